from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nestmodel.nn import subsampling as reference
from nestmodel.nn.backend import KERNELS
from nestmodel.nn.gpu import devices, subsampling
from nestmodel.nn.gpu.subsampling import AcceleratedConvSubsampling
from nestmodel.nn.subsampling import num_subsampled
from tests.kernel_definitions import code_for_gpus
from tests.kernels import compile_kernel, run_interpreted


def test_features_that_need_a_gradient_get_one() -> None:
    feats = torch.randn(1, 10, 16, requires_grad=True)
    AcceleratedConvSubsampling(num_mels=10, channels=6, factor=8, dim=5)(feats, torch.tensor([16]))[0].sum().backward()
    assert feats.grad is not None
    assert feats.grad.abs().sum() > 0


INTERPRETED = """
import numpy
import torch
import triton.language as tl
from triton.runtime import interpreter
from unittest.mock import patch
from functools import partial
from nestmodel.nn.gpu import devices, subsampling
from nestmodel.nn.gpu import first_stages_kernel as kernels
from tests import kernel_definitions as definitions

def numbers(x):  # the interpreter would multiply the bits of bfloat16 as whole numbers
    is_bits = x.dtype.scalar == tl.bfloat16
    return (x.data.astype(numpy.uint32) << 16).view(numpy.float32) if is_bits else x.data

interpreter.InterpreterBuilder.create_dot = lambda self, a, b, d, *_: interpreter.TensorHandle(
    numpy.matmul(numbers(a), numbers(b), dtype=d.data.dtype) + d.data, d.dtype.scalar
)

for is_causal in (False, True):
    compute = partial(subsampling.run_subsampling, is_causal)
    for dtype in (torch.float32, torch.bfloat16):
        assert devices.is_right(compute, torch.device("cpu"), dtype), (dtype, is_causal)
torch.manual_seed(0)
empty = torch.empty
poisoned = lambda *sizes, **options: empty(*sizes, **options).fill_(float("nan"))
# Odd sizes, one frame, padding, more positions than a program takes at a time, features that are not contiguous.
for batch, mels, frames, channels, lens, padding in (
    (1, 1, 1, 1, [1], 1), (2, 80, 5, 6, [5, 4], 1), (3, 7, 66, 130, [66, 13, 0], 1),
    (1, 1, 1, 1, [1], 2), (2, 80, 6, 6, [6, 5], 2), (3, 7, 65, 130, [65, 14, 0], 2),
):
    feats = torch.randn(batch, frames, mels).transpose(1, 2)
    lens = torch.tensor(lens)
    (weight1, weight2), (bias1, bias2) = torch.randn(2, channels, 1, 3, 3), torch.randn(2, channels)
    doubles = [each.double() for each in (feats, weight1, bias1, weight2, bias2)]
    expected = definitions.first_stages(torch.float64, doubles[0], lens, *doubles[1:], padding)
    grad = torch.randn(expected.shape)
    expected_grads = definitions.first_stages_gradients(doubles[0], lens, *doubles[1:4], grad.double(), padding)
    inputs = (feats, lens, weight1.flatten(1), bias1, weight2.flatten(1))
    with patch.object(torch, "empty", poisoned):
        out = torch.empty(expected.shape)
        kernels.launch_first_stages(inputs, bias2, out, padding)
        grads = kernels.launch_gradients(inputs, grad, padding, num_programs=3)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads.double(), expected_grads, rtol=1e-5, atol=1e-4)
    half = torch.empty(expected.shape, dtype=torch.float16)
    kernels.launch_first_stages(inputs, bias2, half, padding)
    of_half = kernels.launch_gradients(inputs, grad.half(), padding)
    torch.testing.assert_close(half.double(), expected, rtol=3e-3, atol=1e-2)
    # Of features and first weights that are rounded as well, because rounding changes signs before the ReLU.
    rounded = [each.half().double() for each in (feats, weight1, bias1)]
    of_rounded = definitions.first_stages_gradients(
        rounded[0], lens, *rounded[1:], weight2.double(), grad.half().double(), padding
    )
    assert (of_half - of_rounded).norm() <= 2e-2 * of_rounded.norm()
    feats[0, 0, 0] = float("nan")
    kernels.launch_first_stages(inputs, bias2, out, padding)
    assert out[0, 0, 0].isnan().all() and out[1:].isfinite().all()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("triton_cache")
def test_kernels_for_a_gpu_compute_the_definition() -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize(("dtype", "padding"), [("bf16", 1), ("fp16", 2), ("fp32", 2)])
@pytest.mark.parametrize(("name", "launch"), [("forward_kernel", "FORWARD"), ("gradient_kernel", "GRADIENT")])
def test_kernels_for_a_gpu_compile_without_spilled_registers(name: str, launch: str, dtype: str, padding: int) -> None:
    from nestmodel.nn.gpu import first_stages_kernel as kernels

    is_float32 = dtype == "fp32"
    options = dict(getattr(kernels, "FLOAT32_GRADIENT" if is_float32 and launch == "GRADIENT" else launch))
    constants = {"precision": "ieee" if is_float32 else "tf32", "padding": padding}
    constants |= {name: options.pop(name) for name in ("positions", "channels")}
    types = {name: "*fp32" for name in ("feats", "weight1", "bias1", "weight2", "bias2", "sums")}
    types |= {"lens": "*i64", "out": f"*{dtype}", "grad": f"*{dtype}"}
    for compiled in compile_kernel(getattr(kernels, name), types, constants, **options):
        assert ("mma" in compiled.ptx) != is_float32, "products do not run on tensor cores"


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL, LARGE = (10, 6, 37), (80, 256, 203)
DEVICES = [
    pytest.param(torch.device("cpu"), SMALL, id="definition"),
    pytest.param(torch.device("cuda"), LARGE, id="gpu", marks=pytest.mark.gpu),
]


def train(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int], is_causal: bool = False
) -> list[Tensor]:
    """Returns valid outputs of a module for a GPU, and its gradients, in products of a type; on the CPU in float64."""
    mels, channels, frames = sizes
    torch.manual_seed(0)
    module = AcceleratedConvSubsampling(num_mels=mels, channels=channels, factor=8, dim=5, is_causal=is_causal)
    feats, lens = torch.randn(3, mels, frames), torch.tensor([frames, 0, frames // 2])
    weights = torch.randn(3, num_subsampled(frames, 8, is_causal=is_causal), 5)
    if dtype == torch.float64:
        module, feats = module.double(), feats.double()
    module.to(device)
    with torch.autocast(device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        encoded, enc_lens = module(feats.to(device), lens.to(device))
    is_valid = torch.arange(encoded.shape[1], device=device) < enc_lens.unsqueeze(1)
    (encoded * weights.to(device))[is_valid].sum().backward()
    values = [encoded[is_valid], *(each.grad for each in module.parameters() if each.grad is not None)]
    return [each.detach().cpu().double() for each in values]


def check_training(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int], is_causal: bool = False
) -> None:
    """Compares with float64 on a CPU, and the errors with those of two convolutions on the same device.

    Most of these are where rounding changes the sign of an input of a ReLU.
    """
    expected = train(torch.device("cpu"), torch.float64, sizes, is_causal)
    found = train(device, dtype, sizes, is_causal)
    with patch.object(subsampling, "_has_kernels", lambda *_: False):
        plain = train(device, dtype, sizes, is_causal)
    assert len(found) == len(expected) == 13
    for one, two, exact in zip(found, plain, expected, strict=True):
        rounding = torch.finfo(dtype).eps * exact.norm()
        assert (one - exact).norm() <= 2 * (two - exact).norm() + 2 * rounding


@pytest.fixture(autouse=True)
def _code_for_gpus() -> Iterator[None]:
    with code_for_gpus():
        yield


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("device", "sizes"), DEVICES)
def test_training_in_every_precision_gives_the_gradients_of_float64(
    device: torch.device,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    is_causal: bool,
) -> None:
    assert subsampling._has_kernels(device, dtype, is_causal)
    check_training(device, dtype, sizes, is_causal)


@pytest.mark.parametrize("is_on_gpu", [True, False])
@pytest.mark.parametrize(("device", "sizes"), DEVICES)
def test_chunks_give_what_a_whole_batch_gives(
    device: torch.device, sizes: tuple[int, int, int], is_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "is_on_gpu", lambda _: is_on_gpu)
    whole = train(device, torch.float32, sizes)
    monkeypatch.setattr(subsampling, "MAX_VALUES_ON_GPU", 1)
    monkeypatch.setattr(reference, "MAX_VALUES", 1)
    for one, other in zip(train(device, torch.float32, sizes), whole, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()  # 80 roundings; a lost chunk changes the first digit


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("device", "sizes"), DEVICES)
def test_activations_that_are_kept_give_the_bits_of_those_that_are_recomputed(
    device: torch.device,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    is_causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subsampling, "MAX_VALUES_ON_GPU", 1)  # several chunks
    convolve, found = AcceleratedConvSubsampling.convolve, {}
    for keeps in (False, True):
        monkeypatch.setattr(AcceleratedConvSubsampling, "backend", replace(KERNELS, keeps_subsampling=keeps))
        with patch.object(AcceleratedConvSubsampling, "convolve", autospec=True, side_effect=convolve) as calls:
            found[keeps] = train(device, dtype, sizes, is_causal)
        assert calls.call_count == (3 if keeps else 6)
    for kept, recomputed in zip(found[True], found[False], strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.usefixtures("restored_determinism")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("device", "sizes"), DEVICES)
def test_deterministic_mode_gives_equal_bits(
    device: torch.device, sizes: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    check_training(device, dtype, sizes)
    for one, other in zip(train(device, dtype, sizes), train(device, dtype, sizes), strict=True):
        assert torch.equal(one, other)
