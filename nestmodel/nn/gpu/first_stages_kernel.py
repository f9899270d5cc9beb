"""`nestmodel.nn.gpu.first_stages` as one kernel of a GPU for each direction, which store nothing of the first stage.

Values of the first stage are computed where the second stage needs them, 2.25 times on average. A program processes
`POSITIONS` outputs of the second stage, counted over utterances, frames and bins, and `CHANNELS` channels. The nine
values that a value of the first stage depends on, and a one for the bias, are a row of a matrix product.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

POSITIONS = 32
GRADIENT_POSITIONS = 16
"""`POSITIONS` of the gradients: with 32, only one program at a time fits into a multiprocessor, and newer compilers run
out of registers."""

CHANNELS = 128
OPTIONS = {"num_warps": 8, "num_stages": 1}
"""Launch options with which all values stay in the registers of an A100 or H100, in every type."""

TAPS = tl.constexpr(16)
"""Nine taps of a 3x3 convolution, one for the bias, and zeros: Triton's matrix products sum 16 terms at least."""

NOT_SPECIALIZED = ["num_frames2", "num_positions"]
"""Sizes that differ from batch to batch, for which the kernels are not compiled again."""

PROGRAMS = 512
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
    num_positions, num_channels = out.shape[:3].numel(), out.shape[3]
    if out.numel() > 0:
        grid = (triton.cdiv(num_positions, POSITIONS), triton.cdiv(num_channels, CHANNELS))
        with torch.cuda.device_of(out):  # Triton launches on the current device
            forward_kernel[grid](*inputs, bias2, out, *_sizes(inputs[0], out), padding, POSITIONS, CHANNELS, **OPTIONS)


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
    num_programs = max(1, min(num_programs, triton.cdiv(num_positions, GRADIENT_POSITIONS)))
    # Each program has sums of its own, so that the order of the sum is the same every time.
    sums = torch.empty(num_programs, 2 * TAPS.value, num_channels, device=grad.device)
    grid = (num_programs, triton.cdiv(num_channels, CHANNELS))
    with torch.cuda.device_of(grad):
        sizes = *_sizes(inputs[0], grad), padding, GRADIENT_POSITIONS, CHANNELS
        gradient_kernel[grid](*inputs, grad, sums, *sizes, **OPTIONS)
    return sums.sum(0)


def _sizes(feats: Tensor, values: Tensor) -> tuple[int | str, ...]:
    """Returns strides and sizes, and the precision of products: for half precision, the 11 bits that float16 has."""
    precision = "ieee" if values.dtype == torch.float32 else "tf32"
    return *feats.stride(), feats.shape[1], *values.shape[1:3], values.shape[:3].numel(), values.shape[3], precision


@triton.jit
@no_type_check
def rounded(x, precision: tl.constexpr):
    """Rounds to the bits that a product in TF32 reads; a GPU would cut the other ones off."""
    if precision == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # not NaN, which would become a number
    return x


@triton.jit
@no_type_check
def first_stage(
    feats,
    utterance,
    num_valid,
    frame,
    mel,
    stride_mel,
    stride_frame,
    num_mels,
    num_bins,
    matrix,
    precision: tl.constexpr,
    padding: tl.constexpr,
    tap,
):
    """Returns values of the first stage at the tap `tap` of the second one, which were valid, and their inputs."""
    frame1, bin1 = 2 * frame + tap // 3 - padding, 2 * mel + tap % 3 - padding
    is_valid = (frame1 >= 0) & (frame1 < (num_valid + padding) // 2) & (bin1 >= 0) & (bin1 < num_bins)
    column = tl.arange(0, TAPS)[None, :]
    frame0, mel0 = 2 * frame1[:, None] + column // 3 - padding, 2 * bin1[:, None] + column % 3 - padding
    is_read = (column < 9) & (frame0 >= 0) & (frame0 < num_valid[:, None]) & (mel0 >= 0) & (mel0 < num_mels)
    inputs = tl.load(feats + utterance[:, None] + mel0 * stride_mel + frame0 * stride_frame, mask=is_read, other=0.0)
    inputs = rounded(tl.where(column == 9, 1.0, inputs), precision)
    values = tl.dot(inputs, matrix, input_precision=precision)
    # Not a maximum, which would hide NaN.
    is_positive = is_valid[:, None] & ~(values <= 0.0)
    return tl.where(is_positive, values, 0.0), is_positive, inputs


@triton.jit
@no_type_check
def places(position, lens, stride_utterance, num_frames2, num_bins2, is_position):
    """Returns where the utterances of positions start, their numbers of valid frames, and frames and bins."""
    row = position // num_bins2
    utterance = row // num_frames2
    num_valid = tl.load(lens + utterance, mask=is_position, other=0).to(tl.int32)
    return utterance.to(tl.int64) * stride_utterance, num_valid, row % num_frames2, position % num_bins2


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
    num_channels,
    precision: tl.constexpr,
    padding: tl.constexpr,
    positions: tl.constexpr,
    channels: tl.constexpr,
):
    """Computes the values of both stages at `positions` positions for `channels` channels."""
    position = tl.program_id(0) * positions + tl.arange(0, positions)
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    is_position, is_channel = position < num_positions, channel < num_channels
    utterance, num_valid, frame, mel = places(position, lens, stride_utterance, num_frames2, num_bins2, is_position)
    matrix = first_matrix(weight1, bias1, channel, is_channel, precision)
    total = tl.load(bias2 + channel, mask=is_channel, other=0.0)[None, :] + tl.zeros((positions, channels), tl.float32)
    num_bins = (num_mels + padding) // 2
    for tap in range(9):
        values, _, _ = first_stage(
            feats,
            utterance,
            num_valid,
            frame,
            mel,
            stride_mel,
            stride_frame,
            num_mels,
            num_bins,
            matrix,
            precision,
            padding,
            tap,
        )
        total += values * tl.load(weight2 + channel * 9 + tap, mask=is_channel, other=0.0)[None, :]
    place = position.to(tl.int64)[:, None] * num_channels + channel[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_position[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
@no_type_check
def gradient_kernel(
    feats,
    lens,
    weight1,
    bias1,
    weight2,
    grad,
    sums,
    stride_utterance,
    stride_mel,
    stride_frame,
    num_mels,
    num_frames2,
    num_bins2,
    num_positions,
    num_channels,
    precision: tl.constexpr,
    padding: tl.constexpr,
    positions: tl.constexpr,
    channels: tl.constexpr,
):
    """Sums the gradients of weights and biases over every `tl.num_programs(0)`th block of positions."""
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    is_channel = channel < num_channels
    matrix = first_matrix(weight1, bias1, channel, is_channel, precision)
    row = tl.arange(0, TAPS)[:, None]
    of_first, of_second = tl.zeros((TAPS, channels), tl.float32), tl.zeros((TAPS, channels), tl.float32)
    num_bins = (num_mels + padding) // 2
    start = tl.program_id(0) * positions
    while start < num_positions:
        position = start + tl.arange(0, positions)
        is_position = position < num_positions
        utterance, num_valid, frame, mel = places(position, lens, stride_utterance, num_frames2, num_bins2, is_position)
        place = position.to(tl.int64)[:, None] * num_channels + channel[None, :]
        given = tl.load(grad + place, mask=is_position[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
        of_second += tl.where(row == 9, tl.sum(given, 0)[None, :], 0.0)
        for tap in range(9):
            values, is_positive, inputs = first_stage(
                feats,
                utterance,
                num_valid,
                frame,
                mel,
                stride_mel,
                stride_frame,
                num_mels,
                num_bins,
                matrix,
                precision,
                padding,
                tap,
            )
            of_second += tl.where(row == tap, tl.sum(given * values, 0)[None, :], 0.0)
            weight = tl.load(weight2 + channel * 9 + tap, mask=is_channel, other=0.0)[None, :]
            of_values = rounded(tl.where(is_positive, given * weight, 0.0), precision)
            of_first = tl.dot(tl.trans(inputs), of_values, of_first, input_precision=precision)
        start += tl.num_programs(0) * positions
    place = (tl.program_id(0) * 2 * TAPS + row) * num_channels + channel[None, :]
    tl.store(sums + place, of_first, mask=is_channel[None, :])
    tl.store(sums + place + TAPS * num_channels, of_second, mask=is_channel[None, :])
