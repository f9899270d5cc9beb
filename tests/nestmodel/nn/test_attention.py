import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from nestmodel.nn.attention import Frames, RelPositionAttention, describe_frames, relative_positions
from nestmodel.nn.gpu.cast_weights import cast_weights
from nestmodel.nn.gpu.relative_attention import attend, attention_parameters, describe_gpu_frames
from nestmodel.nn.precision import product_dtype
from tests.kernel_definitions import code_for_gpus

CPU = torch.device("cpu")


def build(*, dim: int = 8, num_heads: int = 2, dropout: float = 0.0, use_bias: bool = True) -> RelPositionAttention:
    module = RelPositionAttention(dim=dim, num_heads=num_heads, dropout=dropout, use_bias=use_bias)
    torch.nn.init.normal_(module.pos_bias_u)
    torch.nn.init.normal_(module.pos_bias_v)
    return module


def frames(x: Tensor, *lens: int) -> Frames:
    return describe_frames(x, torch.tensor(lens or [x.shape[1]] * len(x), device=x.device))


def reference(module: RelPositionAttention, x: Tensor, *lens: int) -> Tensor:
    out: Tensor = module(x, frames(x, *lens))
    return out


def on_gpu(module: RelPositionAttention, x: Tensor, *lens: int) -> Tensor:
    described = describe_gpu_frames(x, torch.tensor(lens or [x.shape[1]] * len(x), device=x.device))
    (weights,) = cast_weights([attention_parameters(module)], product_dtype(x))
    with nullcontext() if x.is_cuda else code_for_gpus():
        return attend(module, x, described, weights, None)


def by_definition(module: RelPositionAttention, x: Tensor, num_valid: int) -> Tensor:
    """Attention over the valid frames of one utterance, computed for one pair of frames and one head at a time."""
    size = x.shape[1] // module.num_heads
    positions = relative_positions(len(x), x.shape[1], CPU)
    mixed = torch.zeros_like(x)
    for head in range(module.num_heads):
        part = slice(head * size, (head + 1) * size)
        q, k, v = module.linear_q(x)[:, part], module.linear_k(x)[:, part], module.linear_v(x)[:, part]
        p = module.linear_pos(positions)[:, part]
        for i in range(num_valid):
            scores = [
                ((q[i] + module.pos_bias_u[head]) @ k[j] + (q[i] + module.pos_bias_v[head]) @ p[len(x) - 1 - (i - j)])
                / math.sqrt(size)
                for j in range(num_valid)
            ]
            mixed[i, part] = torch.stack(scores).softmax(0) @ v[:num_valid]
    out: Tensor = module.linear_out(mixed)
    return out


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("num_valid", [0, 1, 4, 6])
def test_attention_equals_its_definition(num_valid: int, with_gradients: bool) -> None:
    module, x = build().eval(), torch.randn(1, 6, 8, requires_grad=with_gradients)
    with torch.set_grad_enabled(with_gradients):  # without gradients, a CPU uses torch's fused attention
        actual = module(x, frames(x, num_valid))[0]
    assert actual.requires_grad == with_gradients
    assert torch.allclose(actual, by_definition(module, x[0], num_valid), atol=1e-6)
    if with_gradients:
        actual.sum().backward()
        assert x.grad is not None
        assert not x.grad[0, num_valid:].any()


def run(compute: Callable[..., Tensor], module: RelPositionAttention, x: Tensor, *lens: int) -> list[Tensor]:
    """Returns output and gradients; no gradient is constant over frames or dimensions."""
    module.zero_grad()
    inputs = x.clone().requires_grad_()
    out = compute(module, inputs, *lens)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).sin()).sum().backward()
    assert inputs.grad is not None
    return [out.detach(), inputs.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("is_compiling", [False, True])  # whether to write what torch's compiler fuses
@pytest.mark.parametrize(("num_frames", "dim"), [(13, 8), (16, 16), (7, 44), (1, 10)])
def test_the_code_for_gpus_gives_the_same_output_and_gradients(
    num_frames: int, dim: int, is_compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It pads keys of the scores and dimensions of heads (4, 8, 22 and 5) to multiples of 8.
    module, x = build(dim=dim).double(), torch.randn(2, num_frames, dim, dtype=torch.float64)
    lens = (num_frames, (num_frames + 1) // 2)
    expected = run(reference, module, x, *lens)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    for ours, theirs in zip(run(on_gpu, module, x, *lens), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # float64 has 16 digits


def test_padded_keys_have_zero_weight_under_autocast() -> None:
    module, x = build(), torch.randn(1, 6, 8)
    other = x.clone()
    other[0, 4:] = 100.0
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x, frames(x, 4))[0, :4], module(other, frames(x, 4))[0, :4])
