import torch
from torch import nn

from nestmodel.nn.gpu.cast_weights import cast_weights, fused_parameters


def test_a_frozen_parameter_gets_no_gradient() -> None:
    layer = nn.Linear(4, 3)
    layer.weight.requires_grad_(False)
    [[(weight, bias)]] = cast_weights([[fused_parameters(layer)]], torch.bfloat16)
    assert bias is not None
    (weight.sum() + bias.sum()).backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
