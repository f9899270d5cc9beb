"""Kernels of blocks: against their definitions in Triton's interpreter, compiled for two GPUs, and on a GPU."""

import pytest
import torch

from nestmodel.config import NestConfig
from nestmodel.nn.gpu import check
from nestmodel.nn.gpu.gated_convolution import FRAMES_PER_PART
from nestmodel.nn.gpu.relative_attention import MAX_KEYS
from tests.kernels import compile_kernel, run_interpreted

HEAD = """
import torch
from unittest.mock import patch
from nestmodel import NestConfig
from nestmodel.config import EncoderConfig
from tests import kernel_definitions as definitions

torch.manual_seed(0)
empty, empty_like = torch.empty, torch.empty_like
def poisoned(*sizes, **options):
    found = empty(*sizes, **options)
    return found.fill_(float("nan")) if found.is_floating_point() else found

def compare(found, expected, dtype):
    for one, two in zip(found, expected, strict=True):
        limit = 8 * torch.finfo(dtype).eps if one.dtype == dtype else 1e-5
        assert one.shape == two.shape
        assert (one.double() - two).norm() <= limit * two.norm() + 1e-9, ((one.double() - two).norm() / two.norm())
"""

CONVOLUTION = (
    HEAD
    + """
from nestmodel.nn.gpu.gated_convolution import FRAMES_PER_PART, join_moments
from nestmodel.nn.gpu.gated_convolution_kernel import launch_forward, launch_gradients

def run(dtype, lens, frames, dim, taps, left, has_bias):
    lens = torch.tensor(lens)
    drawn = torch.randn(len(lens), frames, 2 * dim), torch.randn(2 * dim), torch.randn(dim, taps), torch.randn(dim)
    gates, gate_bias, weight, bias = (each.to(dtype) for each in drawn)
    grad = torch.randn(len(lens), frames, dim).to(dtype)
    biases = (gate_bias, bias) if has_bias else (None, None)
    double = lambda x: None if x is None else x.double()
    exact = [double(gates), lens, double(biases[0]), weight.double()]
    expected = definitions.gated_convolution(*exact, double(biases[1]), left)
    expected_grads = definitions.gated_convolution_gradients(*exact, grad.double(), left)
    with patch.object(torch, "empty", poisoned):
        found, parts = launch_forward(gates, lens, biases[0], weight, biases[1], left, FRAMES_PER_PART)
        found_grads = launch_gradients(gates, lens, biases[0], weight, grad, left, FRAMES_PER_PART)
    compare([found, *found_grads], [expected[0], *expected_grads], dtype)
    mean, var = join_moments(parts, frames)
    rounded = found.double().flatten(0, 1)  # the moments are those of the values that are stored
    compare([mean, var], [rounded.mean(0), rounded.var(0, unbiased=False)], torch.float32)
    return gates, lens, biases, weight, found

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    run(dtype, [70, 0, 33], 70, 130, 9, 4, True)
run(torch.bfloat16, [40, 17], 40, 66, 9, 8, False)  # causal, without biases
run(torch.float32, [1], 1, 3, 3, 1, True)
run(torch.float32, [65, 64, 1], 65, 5, 15, 2, True)
gates, lens, biases, weight, found = run(torch.float32, [32, 20], 33, 130, 1, 0, True)
gates[0, 3, 7] = float("nan")
again, _ = launch_forward(gates, lens, biases[0], weight, biases[1], 0, FRAMES_PER_PART)
assert again[0, 3, 7].isnan() and again[0, 3, 7 + 1 :].isfinite().all() and torch.equal(again[1], found[1])
"""
)

ATTENTION = (
    HEAD
    + """
from nestmodel.nn.gpu.attention_weights_kernel import launch_gradients, launch_weights
from nestmodel.nn.gpu.relative_attention import _limits

KEY = torch.tensor([123456789, -987654321], dtype=torch.int32)

def run(dtype, lens, frames, heads, context, style="regular", key=KEY, num_dropped=6554):
    lens, keys = torch.tensor(lens), -(-frames // 8) * 8
    limits = None if context is None else _limits(context, style, torch.device("cpu"))
    scores, grad = (5 * torch.randn(2, len(lens), heads, frames, keys)).to(dtype)
    by_distance = torch.randn(heads, len(lens) * frames, 2 * keys).to(dtype)
    # Columns that products fill with anything are not read.
    scores[..., frames:] = float("nan")
    exact = torch.nan_to_num(scores.double())
    expected = definitions.attention_weights(exact, by_distance.double(), lens, limits, key, num_dropped)
    poisoned_like = lambda x: poisoned(x.shape, dtype=x.dtype)
    with patch.object(torch, "empty", poisoned), patch.object(torch, "empty_like", poisoned_like):
        weights, kept = launch_weights(scores.clone(), by_distance, lens, limits, key, num_dropped)
        compare([weights, kept], expected, dtype)
        assert torch.equal(kept == 0, expected[1].to(dtype) == 0)
        given = definitions.attention_gradients(weights.double(), grad.double(), key, num_dropped)
        found = launch_gradients(weights, grad.clone(), key, num_dropped)
        compare(found, given, dtype)

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    run(dtype, [45, 0, 20], 45, 2, None)
run(torch.float32, [1, 1], 1, 3, None)
run(torch.bfloat16, [64, 63], 64, 1, None, key=None)
run(torch.float32, [37, 12], 37, 2, (5, 2))
run(torch.float32, [37, 12], 37, 2, (6, 2), "chunked_limited", num_dropped=60000)
run(torch.float32, [21, 40], 40, 1, (-1, 3), "chunked_limited", key=None)
run(torch.float32, [21, 40], 40, 1, (0, 0))
run(torch.float32, [1030], 1030, 1, None)  # a row for each program
"""
)

HEADS = (
    HEAD
    + """
from nestmodel.nn.gpu.heads_kernel import launch_join, launch_split

def run(dtype, batch, frames, heads, head_dim, width, has_bias=True):
    keys = -(-frames // 8) * 8
    qkv, biases = torch.randn(batch, frames, 3, heads, head_dim).to(dtype), torch.randn(2, heads, head_dim).to(dtype)
    in_bias = torch.randn(3 * heads * head_dim).to(dtype) if has_bias else None
    exact = None if in_bias is None else in_bias.double()
    expected = definitions.split_heads(qkv.double(), exact, biases.double(), keys, width)
    grads = tuple(torch.randn(each.shape).to(dtype) for each in expected)
    expected_grads = definitions.join_heads(tuple(each.double() for each in grads), frames, head_dim)
    with patch.object(torch, "empty", poisoned):
        compare(launch_split(qkv, in_bias, biases, keys, width), expected, dtype)
        compare(launch_join(grads, frames, head_dim), expected_grads, dtype)

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    run(dtype, 3, 37, 4, 34, 40)
run(torch.float32, 1, 1, 1, 2, 8)
run(torch.bfloat16, 2, 64, 2, 64, 64, has_bias=False)
"""
)

BLOCK = (
    HEAD
    + """
import sys
from dataclasses import replace
from functools import partial
from nestmodel.nn.gpu import (
    attention_weights_kernel, check, devices, dropout_kernel, gated_convolution_kernel, heads_kernel
)

base = EncoderConfig(d_model=136, num_heads=4, num_layers=1, ff_expansion=1, dropout=0.1, dropout_att=0.1)
streaming = replace(base, att_context_size=((6, 2),), att_context_style="chunked_limited", conv_norm="layer_norm",
                    conv_context_size="causal", use_bias=False)
cpu = torch.device("cpu")
for dtype in (torch.float32, torch.bfloat16):
    for config in (base, streaming):
        assert devices.is_right(partial(check.run_block, config, 45), cpu, dtype), (dtype, config)

def spoiled(launch, number, value):
    def spoil(*inputs):
        found = launch(*inputs)
        outputs = list(found) if isinstance(found, tuple) else [found]
        outputs[number].view(-1)[outputs[number].numel() // 3 :: 50] *= value
        return found
    return spoil

# One value of fifty that is wrong is found, whatever kernel computed it.
for module, name, number in (
    (gated_convolution_kernel, "launch_forward", 0), (gated_convolution_kernel, "launch_forward", 1),
    (gated_convolution_kernel, "launch_gradients", 0), (gated_convolution_kernel, "launch_gradients", 1),
    (attention_weights_kernel, "launch_weights", 1), (attention_weights_kernel, "launch_gradients", 0),
    (attention_weights_kernel, "launch_gradients", 1), (dropout_kernel, "launch_drop", 0),
    (heads_kernel, "launch_split", 2), (heads_kernel, "launch_join", 0), (heads_kernel, "launch_join", 1),
):
    with patch.object(module, name, spoiled(getattr(module, name), number, 3.0)):
        assert not devices.is_right(partial(check.run_block, base, 45), cpu, torch.float32), (name, number)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [CONVOLUTION, ATTENTION, HEADS, BLOCK], ids=["convolution", "attention", "heads", "block"]
)
@pytest.mark.usefixtures("triton_cache")
def test_kernels_compute_their_definition(code: str) -> None:
    run_interpreted(code)


CONFIGS = {name: NestConfig.preset(*name.split("+")).conformer for name in ("large", "xlarge", "large+streaming")}


@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("direction", ["forward", "gradient"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("preset", CONFIGS)
def test_convolutions_compile_and_eight_programs_fit_into_a_multiprocessor(
    preset: str, dtype: str, direction: str
) -> None:
    from nestmodel.nn.gpu import gated_convolution_kernel as kernels

    config = CONFIGS[preset]
    sizes = config.conv_context[0], config.conv_kernel_size, FRAMES_PER_PART
    constants = kernels.constants(direction, config.use_bias, *sizes)
    tensors = ("gates", "gate_bias", "weight", "bias", "grad", "out", "of_gates")
    types = {"lens": "*i64", "parts": "*fp32", "partial_sums": "*fp32", **{name: f"*{dtype}" for name in tensors}}
    if not config.use_bias:
        constants |= {"gate_bias": None, "bias": None}
    kernel = getattr(kernels, "convolution_kernel" if direction == "forward" else "convolution_gradient_kernel")
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    for compiled in compile_kernel(kernel, types, constants, num_warps=1):
        assert compiled.num_registers <= 65536 // (8 * 32)


@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("num_keys", [8, 192, 3000, MAX_KEYS])
@pytest.mark.parametrize("name", ["weights_kernel", "gradients_kernel"])
def test_rows_of_attention_compile_and_stay_in_registers(name: str, num_keys: int) -> None:
    from nestmodel.nn.gpu import attention_weights_kernel as kernels

    kernel, constants = getattr(kernels, name), {**kernels.constants(num_keys, True), "is_limited": True}
    num_warps = constants.pop("num_warps")
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    half = ("scores", "by_distance", "kept", "weights", "grad")
    types = {"lens": "*i64", "limits": "*i32", "key": "*i32", "scale": "fp32", **{name: "*bf16" for name in half}}
    compile_kernel(kernel, types, constants, num_warps=num_warps)


@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("name", ["split_kernel", "join_kernel"])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 44), (8, 64), (8, 128)])
def test_heads_compile_and_stay_in_registers(num_heads: int, head_dim: int, name: str) -> None:
    from nestmodel.nn.gpu import heads_kernel as kernels

    kernel, constants = getattr(kernels, name), kernels.constants(num_heads, head_dim, -(-head_dim // 8) * 8)
    num_warps = constants.pop("num_warps")
    tensors = {name: "*bf16" for name in kernel.arg_names if name.startswith("of_")}
    tensors |= {name: "*bf16" for name in ("qkv", "in_bias", "biases", "content", "position", "keys", "values")}
    types = {**tensors, "parts": "*fp32", "partial_sums": "*fp32", "scale": "fp32"}
    if name == "split_kernel":
        constants = {**constants, "has_bias": True}
    compile_kernel(kernel, types, constants, num_warps=num_warps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("preset", CONFIGS)
def test_a_block_on_a_gpu_is_as_exact_as_operations_of_torch(preset: str, dtype: torch.dtype) -> None:
    assert check.is_right(torch.device("cuda"), dtype, check.small_config(CONFIGS[preset]))
