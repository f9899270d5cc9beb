import torch
from torch import nn

from nestmodel.nn.gpu.cast_weights import cast_weights, fused_parameters


def test_parameters_are_converted_and_joined_and_their_gradients_are_converted_back() -> None:
    torch.manual_seed(0)
    first, second, third = nn.Linear(4, 3), nn.Linear(4, 5), nn.Conv1d(4, 2, 3, bias=False)
    modules = [[fused_parameters(first, second)], [fused_parameters(third)]]
    [[(weight, bias)], [(kernel, none)]] = cast_weights(modules, torch.bfloat16)
    assert bias is not None
    assert none is None
    assert torch.equal(weight, torch.cat([first.weight, second.weight]).bfloat16())
    assert torch.equal(bias, torch.cat([first.bias, second.bias]).bfloat16())
    assert torch.equal(kernel, third.weight.bfloat16())
    factors = [torch.arange(tensor.numel(), dtype=torch.bfloat16).view_as(tensor) for tensor in (weight, bias, kernel)]
    for _ in range(2):  # the second backward pass adds to the gradients
        tensors = zip(cast_weights(modules, torch.bfloat16)[0][0], factors[:2], strict=True)
        (sum((tensor * factor).sum() for tensor, factor in tensors if tensor is not None)).backward()
    assert third.weight.grad is None or not third.weight.grad.any()
    assert first.weight.grad is not None
    assert first.weight.grad.dtype == torch.float32
    assert torch.equal(first.weight.grad, 2 * factors[0][:3].float())
    assert second.weight.grad is not None
    assert torch.equal(second.weight.grad, 2 * factors[0][3:].float())
    assert second.bias.grad is not None
    assert torch.equal(second.bias.grad, 2 * factors[1][3:].float())


def test_a_frozen_parameter_gets_no_gradient() -> None:
    layer = nn.Linear(4, 3)
    layer.weight.requires_grad_(False)
    [[(weight, bias)]] = cast_weights([[fused_parameters(layer)]], torch.bfloat16)
    assert bias is not None
    (weight.sum() + bias.sum()).backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
