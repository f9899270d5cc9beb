import math
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestmodel.nn.dropout import Dropout, draw_keys, drop
from nestmodel.nn.gpu.dropout import drop_on_gpu
from tests.kernel_definitions import code_for_gpus
from tests.kernels import compile_kernel, run_interpreted

KEY = torch.tensor([123456789, -987654321], dtype=torch.int32)
numbers = st.integers(-(2**31), 2**31 - 1)


def is_kept(index: int, key: Sequence[int], num_dropped: int) -> bool:
    """The definition once more, in numbers without a limit."""
    mixed = (index // 2 * 0x9E3779B1 + key[0]) % 2**32
    mixed = ((mixed ^ mixed >> 16) * 0x7FEB352D + key[1]) % 2**32
    mixed = (mixed ^ mixed >> 15) * 0x846CA68B % 2**32
    mixed ^= mixed >> 16
    half = mixed >> 16 if index % 2 else mixed & 0xFFFF
    return half - 2**16 * (half >= 2**15) >= num_dropped - 2**15


def drop_in_training(prob: float, x: Tensor, key: Tensor | None) -> Tensor:
    dropped: Tensor = Dropout(prob).train()(x, key)
    return dropped


@given(st.tuples(numbers, numbers), st.integers(1, 2**16 - 1), st.integers(0, 40))
def test_a_value_is_dropped_by_a_hash_of_key_and_position(
    key: tuple[int, int], num_dropped: int, num_values: int
) -> None:
    x = torch.arange(1.0, num_values + 1, dtype=torch.float64)
    scale = 65536 / (65536 - num_dropped)
    expected = [float(i + 1) * scale if is_kept(i, key, num_dropped) else 0.0 for i in range(num_values)]
    drawn = torch.tensor(key, dtype=torch.int32)
    for out in (drop(x, drawn, num_dropped), drop_in_training(num_dropped / 65536, x, drawn)):
        torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_cpu_computes_the_definition(dtype: torch.dtype, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for shape in [(0,), (1,), (3, 1001, 77), (2, 65_536), (131_073,)]:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            assert torch.equal(drop_in_training(0.1, x, KEY), drop(x, KEY, 6554))
    finally:
        torch.set_num_threads(before)
    x = torch.randn(5, 4, 3).transpose(0, 2)
    assert torch.equal(drop_in_training(0.1, x, KEY), drop(x, KEY, 6554))


def test_keys_of_places_and_of_steps_decide_independently() -> None:
    keys = torch.cat([draw_keys(step, 25, 7).flatten(0, 1) for step in range(3)])
    assert len(keys.unique(dim=0)) == 3 * 25 * 7
    assert len(keys.flatten().unique()) == 2 * len(keys)
    is_dropped = torch.stack([drop(torch.ones(20_000), key, 2**15) == 0 for key in keys]).double()
    correlation = torch.corrcoef(is_dropped).fill_diagonal_(0).abs()
    assert correlation.max().item() < 6 / math.sqrt(20_000)
    assert torch.equal(draw_keys(5, 2, 7), draw_keys(5, 2, 7))


INTERPRETED = """
import warnings
import torch
from nestmodel.nn.dropout import drop
from nestmodel.nn.gpu.dropout_kernel import launch_drop

warnings.simplefilter("ignore")  # numpy warns where numbers wrap around
key = torch.tensor([123456789, -987654321], dtype=torch.int32)
for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-6)):
    for shape in ((0,), (1,), (3, 1001), (2048,), (5, 4, 3)):
        x = torch.randn(shape).to(dtype)
        x = x.transpose(0, 2) if len(shape) == 3 else x
        for num_dropped in (1, 6554, 65535):
            ours, expected = launch_drop(x, key, num_dropped, 65536 / (65536 - num_dropped)), drop(x, key, num_dropped)
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=0)
            assert torch.equal(ours == 0, expected == 0)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("triton_cache")
def test_the_kernel_for_a_gpu_computes_the_definition() -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.usefixtures("triton_cache")
def test_the_kernel_for_a_gpu_compiles() -> None:
    from nestmodel.nn.gpu import dropout_kernel as kernel

    types = {"x": "*bf16", "key": "*i32", "out": "*bf16", "scale": "fp32"}
    compile_kernel(kernel.drop_kernel, types, {"size": kernel.VALUES_PER_PROGRAM})


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DEVICES = [
    pytest.param(torch.device("cpu"), (3, 101, 7), id="cpu"),
    pytest.param(torch.device("cuda"), (3, 1001, 77), id="gpu", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("device", "shape"), DEVICES)
def test_a_gpu_drops_what_a_cpu_drops(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # A tensor that is not contiguous
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(2, *shape, generator=generator).to(dtype).transpose(1, -1)
    given = x.to(device).requires_grad_()
    with nullcontext() if device.type == "cuda" else code_for_gpus():
        dropped = drop_on_gpu(Dropout(0.1).train(), given, KEY.to(device))
    (dropped * weights.to(device)).sum().backward()
    assert given.grad is not None
    # The kernel multiplies in float32 and rounds once; the definition rounds in the type of the values.
    tolerance = 2 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for found, plain in ((dropped, x), (given.grad, weights)):
        expected = drop(plain, KEY, 6554)
        torch.testing.assert_close(found.detach().cpu(), expected, rtol=tolerance, atol=0)
        assert torch.equal(found.cpu() == 0, expected == 0)
