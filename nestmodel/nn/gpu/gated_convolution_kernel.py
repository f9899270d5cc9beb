"""`nestmodel.nn.gpu.gated_convolution` as one kernel of a GPU for each direction.

A program walks over the frames of one part of an utterance, for a few channels. Registers hold what the next frames
read again: the last inputs of the convolution, or the last gradients of its outputs. So each value is read and gated
once.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestmodel.nn.gpu.devices import launch

_STEPS = {"forward": 4, "gradient": 2}
"""Frames whose values are read together."""

_SIZES = ["num_frames", "num_parts"]
"""Sizes that differ from batch to batch, for which the kernels are not compiled again."""


def launch_forward(
    gates: Tensor, lens: Tensor, gate_bias: Tensor | None, weight: Tensor, bias: Tensor | None, left: int, part: int
) -> tuple[Tensor, Tensor]:
    """Computes what `nestmodel.nn.gpu.gated_convolution` returns, with `part` frames to a part."""
    batch, num_frames, dim = *gates.shape[:2], len(weight)
    num_parts = triton.cdiv(num_frames, part)
    out = torch.empty(batch, num_frames, dim, dtype=gates.dtype, device=gates.device)
    parts = torch.empty(batch, num_parts, 2, dim, dtype=torch.float32, device=gates.device)
    sizes = constants("forward", gate_bias is not None, left, weight.shape[1], part)
    grid = batch * num_parts, triton.cdiv(dim, sizes["channels"])
    tensors = gates, lens, gate_bias, weight, bias, out, parts
    launch(convolution_kernel, grid, *tensors, num_frames, num_parts, dim, **sizes, num_warps=1)
    return out, parts


def launch_gradients(
    gates: Tensor, lens: Tensor, gate_bias: Tensor | None, weight: Tensor, grad: Tensor, left: int, part: int
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of the gates, and the gradients of weights and biases, shape (taps + 3, dim)."""
    batch, num_frames, dim = grad.shape
    taps, num_parts = weight.shape[1], triton.cdiv(num_frames, part)
    of_gates = torch.empty_like(gates)
    # Each program has sums of its own, so that the order of the sum is the same every time.
    partial_sums = torch.empty(batch * num_parts, taps + 3, dim, dtype=torch.float32, device=gates.device)
    sizes = constants("gradient", gate_bias is not None, left, taps, part)
    grid = batch * num_parts, triton.cdiv(dim, sizes["channels"])
    tensors = gates, lens, gate_bias, weight, grad, of_gates, partial_sums
    launch(convolution_gradient_kernel, grid, *tensors, num_frames, num_parts, dim, **sizes, num_warps=1)
    return of_gates, partial_sums.sum(0)


def constants(direction: str, has_bias: bool, left: int, taps: int, part: int) -> dict[str, int | bool]:
    """Returns the constant arguments of a kernel: a thread holds four channels, or two if there are many taps."""
    channels = 128 if taps <= 9 else 64
    sizes = {"left": left, "taps": taps, "steps": _STEPS[direction], "frames": part, "channels": channels}
    return {"has_bias": has_bias, **sizes}


@triton.jit
@no_type_check
def read_gated(gates, frame, num_valid, value_bias, gate_bias, channel, is_channel, dim):
    """Returns values and gates of a frame, both without a gradient if the frame is not valid."""
    is_valid = (frame >= 0) & (frame < num_valid)
    pointer = gates + frame * 2 * dim + channel
    value = tl.load(pointer, mask=is_channel & is_valid, other=0.0).to(tl.float32) + value_bias
    logit = tl.load(pointer + dim, mask=is_channel & is_valid, other=0.0).to(tl.float32) + gate_bias
    return tl.where(is_valid, value, 0.0), tl.where(is_valid, 1.0 / (1.0 + tl.exp(-logit)), 0.0)


@triton.jit
@no_type_check
def read_biases(gate_bias, channel, is_channel, dim, has_bias: tl.constexpr):
    """Returns the biases of values and gates, or zeros."""
    value = tl.zeros(channel.shape, tl.float32)
    logit = value
    if has_bias:
        value = tl.load(gate_bias + channel, mask=is_channel, other=0.0).to(tl.float32)
        logit = tl.load(gate_bias + dim + channel, mask=is_channel, other=0.0).to(tl.float32)
    return value, logit


@triton.jit
@no_type_check
def find_part(lens, num_parts, dim, channels: tl.constexpr):
    """Returns the part of a program, its utterance with the number of valid frames, and its channels."""
    part, utterance = tl.program_id(0) % num_parts, (tl.program_id(0) // num_parts).to(tl.int64)
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    return part, utterance, tl.load(lens + utterance).to(tl.int32), channel, channel < dim


@triton.jit(do_not_specialize=_SIZES)
@no_type_check
def convolution_kernel(
    gates,
    lens,
    gate_bias,
    weight,
    bias,
    out,
    parts,
    num_frames,
    num_parts,
    dim,
    has_bias: tl.constexpr,
    left: tl.constexpr,
    taps: tl.constexpr,
    steps: tl.constexpr,
    frames: tl.constexpr,
    channels: tl.constexpr,
):
    """Computes the outputs of the frames of a part, their mean, and the sum of their squared distances to it."""
    part, utterance, num_valid, channel, is_channel = find_part(lens, num_parts, dim, channels)
    gates += utterance * num_frames * 2 * dim
    out += utterance * num_frames * dim
    value_bias, logit_bias = read_biases(gate_bias, channel, is_channel, dim, has_bias)
    mean = tl.zeros((channels,), tl.float32)
    squares, first = mean, mean
    if has_bias:
        first = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    weights, window = (), ()
    start = part * frames
    end = tl.minimum(start + frames, num_frames)
    for tap in tl.static_range(taps):
        weights = weights + (tl.load(weight + channel * taps + tap, mask=is_channel, other=0.0).to(tl.float32),)
    for tap in tl.static_range(taps - 1):
        value, gate = read_gated(gates, start - left + tap, num_valid, value_bias, logit_bias, channel, is_channel, dim)
        window = window + (value * gate,)
    count = 0
    for number in range(0, frames, steps):
        frame = start + number
        for step in tl.static_range(steps):
            value, gate = read_gated(
                gates, frame + step - left + taps - 1, num_valid, value_bias, logit_bias, channel, is_channel, dim
            )
            window = window + (value * gate,)
        for step in tl.static_range(steps):
            total = first
            for tap in tl.static_range(taps):
                total += window[step + tap] * weights[tap]
            rounded = total.to(out.dtype.element_ty)
            is_frame = frame + step < end
            tl.store(out + (frame + step) * dim + channel, rounded, mask=is_channel & is_frame)
            # Welford's moments, of the values that are stored.
            count += 1
            difference = rounded.to(tl.float32) - mean
            mean += tl.where(is_frame, difference * (1.0 / count), 0.0)
            squares += tl.where(is_frame, difference * (rounded.to(tl.float32) - mean), 0.0)
        window = window[steps:]
    pointer = parts + tl.program_id(0).to(tl.int64) * 2 * dim + channel
    tl.store(pointer, mean, mask=is_channel)
    tl.store(pointer + dim, squares, mask=is_channel)


@triton.jit
@no_type_check
def read_gradient(grad, frame, num_frames, channel, is_channel, dim):
    """Returns the gradients of the outputs of a frame, which are zero outside of the utterance."""
    is_frame = (frame >= 0) & (frame < num_frames)
    return tl.load(grad + frame * dim + channel, mask=is_channel & is_frame, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=_SIZES)
@no_type_check
def convolution_gradient_kernel(
    gates,
    lens,
    gate_bias,
    weight,
    grad,
    of_gates,
    partial_sums,
    num_frames,
    num_parts,
    dim,
    has_bias: tl.constexpr,
    left: tl.constexpr,
    taps: tl.constexpr,
    steps: tl.constexpr,
    frames: tl.constexpr,
    channels: tl.constexpr,
):
    """Computes the gradients of the gates of a part, and its share of the gradients of weights and biases."""
    part, utterance, num_valid, channel, is_channel = find_part(lens, num_parts, dim, channels)
    gates += utterance * num_frames * 2 * dim
    of_gates += utterance * num_frames * 2 * dim
    grad += utterance * num_frames * dim
    value_bias, logit_bias = read_biases(gate_bias, channel, is_channel, dim, has_bias)
    # Frames after the part count as not valid, so that their sums are zero.
    num_read = tl.minimum(num_valid, (part + 1) * frames)
    zero = tl.zeros((channels,), tl.float32)
    of_values, of_logits, of_bias = zero, zero, zero
    weights, sums, window = (), (), ()
    start = part * frames
    end = tl.minimum(start + frames, num_frames)
    # The gradient of an input is a convolution with the taps in reverse order.
    for tap in tl.static_range(taps):
        pointer = weight + channel * taps + taps - 1 - tap
        weights, sums = weights + (tl.load(pointer, mask=is_channel, other=0.0).to(tl.float32),), sums + (zero,)
    for tap in tl.static_range(taps - 1):
        frame = start + left - (taps - 1) + tap
        window = window + (read_gradient(grad, frame, num_frames, channel, is_channel, dim),)
    for number in range(0, frames, steps):
        frame = start + number
        for step in tl.static_range(steps):
            window = window + (read_gradient(grad, frame + step + left, num_frames, channel, is_channel, dim),)
        for step in tl.static_range(steps):
            is_frame = frame + step < end
            value, gate = read_gated(gates, frame + step, num_read, value_bias, logit_bias, channel, is_channel, dim)
            total, added = zero, ()
            for tap in tl.static_range(taps):
                total += window[step + tap] * weights[tap]
                added = added + (sums[tap] + window[step + tap] * (value * gate),)
            sums = added
            total *= gate
            logit = total * value * (1.0 - gate)
            pointer = of_gates + (frame + step) * 2 * dim + channel
            tl.store(pointer, total.to(of_gates.dtype.element_ty), mask=is_channel & is_frame)
            tl.store(pointer + dim, logit.to(of_gates.dtype.element_ty), mask=is_channel & is_frame)
            if has_bias:
                of_values += total
                of_logits += logit
                of_bias += tl.where(is_frame, window[step + taps - 1 - left], 0.0)
        window = window[steps:]
    pointer = partial_sums + tl.program_id(0).to(tl.int64) * (taps + 3) * dim + channel
    for tap in tl.static_range(taps):
        tl.store(pointer + (taps - 1 - tap) * dim, sums[tap], mask=is_channel)
    tl.store(pointer + taps * dim, of_bias, mask=is_channel)
    tl.store(pointer + (taps + 1) * dim, of_values, mask=is_channel)
    tl.store(pointer + (taps + 2) * dim, of_logits, mask=is_channel)
