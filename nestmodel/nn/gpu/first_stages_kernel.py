"""`nestmodel.nn.gpu.first_stages` as one kernel of a GPU for each direction; neither stores the first stage.

Values of the first stage are computed where the second stage needs them, 2.25 times on average. A program processes
some outputs of the second stage at a time, counted over utterances, frames and bins, of some channels. The nine values
that a value of the first stage depends on, and a one for the bias, are a row of a matrix product. Where the second
stage reads a zero, all of them are zero.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestmodel.nn.gpu.devices import launch

FORWARD = {"positions": 16, "channels": 256, "num_warps": 8, "num_stages": 1}
GRADIENT = {"positions": 32, "channels": 128, "num_warps": 8, "num_stages": 1}
FLOAT32_GRADIENT = {"positions": 16, "channels": 128, "num_warps": 8, "num_stages": 1}
"""Values at a time and launch options. All values stay in the registers of an A100 or H100; with `bfloat16`, in most
versions of Triton, two programs fit into a multiprocessor."""

TAPS = tl.constexpr(16)
"""Nine taps of a 3x3 convolution, one for the bias, and zeros: Triton's matrix products sum 16 terms at least."""

NOT_SPECIALIZED = ["num_frames2", "num_positions", "num_each"]
"""Sizes that differ from batch to batch, for which the kernels are not compiled again."""

BLOCKS = 32
"""Blocks of positions of a program of the forward pass, which share weights and the features in the cache."""

PROGRAMS = 256
"""Programs over positions, each of which sums gradients on its own."""


Inputs = tuple[Tensor, ...]
"""Features; numbers of valid frames; weights, (channels, 9), and biases of the full convolution; weights of the
depthwise one. Weights are contiguous, and all but the numbers are float32."""


def launch_first_stages(inputs: Inputs, bias2: Tensor, out: Tensor, padding: int) -> None:
    """Computes both stages; see `nestmodel.nn.gpu.first_stages.first_stages`.

    Args:
        inputs: See `Inputs`.
        bias2: Bias of the depthwise convolution; float32.
        out: Receives the values: (batch, frames, bins, channels), contiguous.
        padding: Zeros in front of frames and bins, 1 or 2.
    """
    num_each = BLOCKS * FORWARD["positions"]
    grid = (triton.cdiv(out.shape[:3].numel(), num_each), triton.cdiv(out.shape[3], FORWARD["channels"]))
    launch(forward_kernel, grid, *inputs, bias2, out, *_sizes(inputs[0], out, num_each), padding, **FORWARD)


def launch_gradients(inputs: Inputs, grad: Tensor, padding: int, num_programs: int = PROGRAMS) -> Tensor:
    """Computes the gradients of weights and biases.

    Args:
        inputs: See `Inputs`.
        grad: Gradient of the values, contiguous.
        padding: Zeros in front of frames and bins, 1 or 2.
        num_programs: Most programs over positions.

    Returns:
        Gradients of the weights of the full convolution in rows 0 to 8, of its bias in row 9, of the depthwise
        convolution in rows 16 to 25, and zeros: (32, channels).
    """
    num_positions, num_channels = grad.shape[:3].numel(), grad.shape[3]
    options = FLOAT32_GRADIENT if grad.dtype == torch.float32 else GRADIENT
    num_each = options["positions"] * max(1, triton.cdiv(num_positions, options["positions"] * num_programs))
    grid = (3, triton.cdiv(num_positions, num_each), triton.cdiv(num_channels, options["channels"]))
    # Each program has sums of its own, so that the order of the sum is the same every time.
    sums = torch.empty(grid[1], 9, TAPS.value, num_channels, device=grad.device)
    launch(gradient_kernel, grid, *inputs[:4], grad, sums, *_sizes(inputs[0], grad, num_each), padding, **options)
    # A positive value of the first stage is a product of weights and inputs, so both gradients follow from these sums.
    by_tap, (weight1, bias1, weight2) = sums.sum(0), inputs[2:]
    found = torch.zeros(32, num_channels, device=grad.device)
    found[:10] = (by_tap[:, :10] * weight2.T[:, None]).sum(0)
    found[16:25] = (by_tap[:, :10] * torch.cat([weight1.T, bias1[None]])).sum(1)
    found[25] = by_tap[0, 10]
    return found


def _sizes(feats: Tensor, values: Tensor, num_each: int) -> tuple[int | str, ...]:
    """Returns strides, sizes, and the precision of products; for 16-bit types, products have float16's 11 bits."""
    precision = "ieee" if values.dtype == torch.float32 else "tf32"
    sizes = feats.shape[1], *values.shape[1:3], values.shape[:3].numel(), num_each, values.shape[3]
    return *feats.stride(), *sizes, precision


@triton.jit
@no_type_check
def rounded(x, precision: tl.constexpr):
    """Rounds to the bits that a product in TF32 reads; without this, a GPU would truncate."""
    if precision == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # not NaN, which would become a number
    return x


@triton.jit
@no_type_check
def is_within(index, size):
    """Returns whether 0 <= index < size, in one comparison."""
    return tl.cast(index, tl.uint32) < tl.cast(size, tl.uint32)  # `cast`, because a size of 1 is not a tensor


@triton.jit
@no_type_check
def load_inputs(outputs, stride_mel, stride_frame, num_mels, precision: tl.constexpr, padding: tl.constexpr, tap):
    """Returns the inputs of values of the first stage at the tap `tap` of the second one; zeros if it is not valid."""
    utterance, num_valid, frame, mel = outputs
    frame1, bin1 = 2 * frame + tap // 3 - padding, 2 * mel + tap % 3 - padding
    is_valid = is_within(frame1, (num_valid + padding) // 2) & is_within(bin1, (num_mels + padding) // 2)
    column = tl.arange(0, TAPS)[None, :]
    frame0, mel0 = 2 * frame1[:, None] + column // 3 - padding, 2 * bin1[:, None] + column % 3 - padding
    is_read = is_valid[:, None] & (column < 9) & is_within(frame0, num_valid[:, None]) & is_within(mel0, num_mels)
    inputs = tl.load(utterance[:, None] + mel0 * stride_mel + frame0 * stride_frame, mask=is_read, other=0.0)
    return rounded(tl.where((column == 9) & is_valid[:, None], 1.0, inputs), precision)


@triton.jit
@no_type_check
def describe_outputs(position, feats, lens, stride_utterance, num_frames2, num_bins2, is_position):
    """Returns for each position: pointer to its utterance, valid frames of the utterance, its frame, and its bin."""
    position, num_frames2, num_bins2 = position.to(tl.uint32), num_frames2.to(tl.uint32), tl.cast(num_bins2, tl.uint32)
    row = position // num_bins2
    utterance = row // num_frames2
    num_valid = tl.load(lens + utterance, mask=is_position, other=0).to(tl.int32)
    frame, mel = (row - utterance * num_frames2).to(tl.int32), (position - row * num_bins2).to(tl.int32)
    return feats + utterance.to(tl.int64) * stride_utterance, num_valid, frame, mel


@triton.jit
@no_type_check
def first_matrix(weight1, bias1, channel, is_channel, precision: tl.constexpr):
    """Returns the weights of the full convolution and its bias as rows of a matrix."""
    row = tl.arange(0, TAPS)[:, None]
    weights = tl.load(weight1 + channel[None, :] * 9 + row, mask=(row < 9) & is_channel[None, :], other=0.0)
    bias = tl.load(bias1 + channel, mask=is_channel, other=0.0)
    return rounded(tl.where(row == 9, bias[None, :], weights), precision)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
@no_type_check
def forward_kernel(
    feats,
    lens,
    weight1,
    bias1,
    weight2,
    bias2,
    out,
    stride_utterance,
    stride_mel,
    stride_frame,
    num_mels,
    num_frames2,
    num_bins2,
    num_positions,
    num_each,
    num_channels,
    precision: tl.constexpr,
    padding: tl.constexpr,
    positions: tl.constexpr,
    channels: tl.constexpr,
):
    """Computes the values of both stages at `num_each` positions for `channels` channels."""
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    is_channel = channel < num_channels
    matrix = first_matrix(weight1, bias1, channel, is_channel, precision)
    bias = tl.load(bias2 + channel, mask=is_channel, other=0.0)
    start = tl.program_id(0) * num_each
    end = tl.minimum(start + num_each, num_positions)
    while start < end:
        position = start + tl.arange(0, positions)
        is_position = position < end
        outputs = describe_outputs(position, feats, lens, stride_utterance, num_frames2, num_bins2, is_position)
        total = bias[None, :] + tl.zeros((positions, channels), tl.float32)
        for tap in tl.static_range(9):
            inputs = load_inputs(outputs, stride_mel, stride_frame, num_mels, precision, padding, tap)
            values = tl.dot(inputs, matrix, input_precision=precision)
            values = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
            total += values * tl.load(weight2 + channel * 9 + tap, mask=is_channel, other=0.0)[None, :]
        offset = position.to(tl.int64)[:, None] * num_channels + channel[None, :]
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=is_position[:, None] & is_channel[None, :])
        start += positions


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
@no_type_check
def gradient_kernel(
    feats,
    lens,
    weight1,
    bias1,
    grad,
    sums,
    stride_utterance,
    stride_mel,
    stride_frame,
    num_mels,
    num_frames2,
    num_bins2,
    num_positions,
    num_each,
    num_channels,
    precision: tl.constexpr,
    padding: tl.constexpr,
    positions: tl.constexpr,
    channels: tl.constexpr,
):
    """Sums gradients times inputs over the positive values of `num_each` positions, for a row of three taps.

    The sum of the gradients alone, which is the gradient of the bias, is in row 10 of the first sum.
    """
    channel = tl.program_id(2) * channels + tl.arange(0, channels)
    is_channel, first = channel < num_channels, 3 * tl.program_id(0)
    matrix = first_matrix(weight1, bias1, channel, is_channel, precision)
    row = tl.arange(0, TAPS)[:, None]
    dtype: tl.constexpr = grad.dtype.element_ty
    of_bias = tl.where(row == 10, 1.0, tl.zeros((TAPS, positions), tl.float32)).to(dtype)
    sum0 = tl.zeros((TAPS, channels), tl.float32)
    sum1, sum2 = sum0, sum0
    start = tl.program_id(1) * num_each
    end = tl.minimum(start + num_each, num_positions)
    while start < end:
        position = start + tl.arange(0, positions)
        is_position = position < end
        outputs = describe_outputs(position, feats, lens, stride_utterance, num_frames2, num_bins2, is_position)
        offset = position.to(tl.int64)[:, None] * num_channels + channel[None, :]
        given = tl.load(grad + offset, mask=is_position[:, None] & is_channel[None, :], other=0.0)
        following = load_inputs(outputs, stride_mel, stride_frame, num_mels, precision, padding, first)
        sum0 = tl.dot(of_bias, given, sum0, input_precision=precision)
        for tap in tl.static_range(3):
            inputs = following
            if tap < 2:  # read ahead
                following = load_inputs(
                    outputs, stride_mel, stride_frame, num_mels, precision, padding, first + tap + 1
                )
            values = tl.dot(inputs, matrix, input_precision=precision)
            # Not a maximum, which would hide NaN.
            passed = tl.where(values <= 0.0, 0.0, given)
            added = tl.dot(tl.trans(inputs).to(dtype), passed, sum0, input_precision=precision)
            sum0, sum1, sum2 = sum1, sum2, added
        start += positions
    offset = ((tl.program_id(1) * 9 + first) * TAPS + row) * num_channels + channel[None, :]
    tl.store(sums + offset, sum0, mask=is_channel[None, :])
    tl.store(sums + offset + TAPS * num_channels, sum1, mask=is_channel[None, :])
    tl.store(sums + offset + 2 * TAPS * num_channels, sum2, mask=is_channel[None, :])
