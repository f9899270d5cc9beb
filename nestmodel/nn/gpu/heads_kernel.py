"""Queries, keys and values of all heads as matrices of single heads, and their gradients back, by one kernel each.

Biases are added on the way there, and their gradients are summed on the way back.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestmodel.nn.gpu.devices import launch

FRAMES = 16
"""Frames of a program."""

_SIZES = ["num_frames", "num_keys"]
"""Sizes that differ from batch to batch, for which the kernels are not compiled again."""

Heads = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries for the scores by content (batch, heads, enc_frames, width) and by position (heads, batch * enc_frames,
width), keys and values (batch, heads, keys, width). Keys past the frames, and columns past the values of a head, are
zero."""


def launch_split(qkv: Tensor, in_bias: Tensor | None, biases: Tensor, num_keys: int, width: int) -> Heads:
    """Returns the matrices of heads.

    Args:
        qkv: Queries, keys and values without their bias: (batch, enc_frames, 3, heads, head_dim), contiguous.
        in_bias: Bias of queries, keys and values: (3 * heads * head_dim,).
        biases: Biases of queries for content and for position: (2, heads, head_dim).
        num_keys: Rows of keys and values, at least `enc_frames`.
        width: Values of a row, at least `head_dim`.
    """
    batch, num_frames, _, num_heads, head_dim = qkv.shape
    content, position, keys, values = (
        torch.empty(*size, width, dtype=qkv.dtype, device=qkv.device)
        for size in (
            (batch, num_heads, num_frames),
            (num_heads, batch * num_frames),
            (batch, num_heads, num_keys),
            (batch, num_heads, num_keys),
        )
    )
    launch(
        split_kernel, (batch * triton.cdiv(num_keys, FRAMES), 3), qkv, in_bias, biases, content, position, keys, values,
        num_frames, num_keys, head_dim**-0.5, has_bias=in_bias is not None, **constants(num_heads, head_dim, width),
    )  # fmt: skip
    return content, position, keys, values


def launch_join(grads: Heads, num_frames: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients of queries, keys and values, and of biases.

    Args:
        grads: Gradients of the matrices of heads.
        num_frames: Number of frames of each utterance.
        head_dim: Values of a head.

    Returns:
        Gradients of `qkv`; and in float32, of shape (5, heads * head_dim), gradients of the biases of queries, keys and
        values, and of the queries for content and for position.
    """
    batch, num_heads, num_keys, width = grads[2].shape
    sizes = batch, num_frames, 3, num_heads, head_dim
    of_qkv = torch.empty(sizes, dtype=grads[0].dtype, device=grads[0].device)
    num_parts = batch * triton.cdiv(num_frames, FRAMES)
    partial_sums = torch.empty(num_parts, 5, num_heads * head_dim, dtype=torch.float32, device=of_qkv.device)
    options = constants(num_heads, head_dim, width)
    launch(join_kernel, (num_parts, 3), *grads, of_qkv, partial_sums, num_frames, num_keys, head_dim**-0.5, **options)
    return of_qkv, partial_sums.sum(0)


def constants(num_heads: int, head_dim: int, width: int) -> dict[str, int]:
    """Returns the constant arguments of the kernels, and their number of warps."""
    columns = triton.next_power_of_2(num_heads * width)
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "width": width, "frames": FRAMES, "columns": columns}
    return {**sizes, "num_warps": min(16, max(1, columns // 256))}


@triton.jit(do_not_specialize=_SIZES)
@no_type_check
def split_kernel(
    qkv,
    in_bias,
    biases,
    content,
    position,
    keys,
    values,
    num_frames,
    num_keys,
    scale,
    has_bias: tl.constexpr,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    frames: tl.constexpr,
    columns: tl.constexpr,
):
    """Copies `frames` rows of queries, keys or values of an utterance, by the second number of the program."""
    num_blocks, slot, dim = tl.cdiv(num_keys, frames), tl.program_id(1), num_heads * head_dim
    utterance, start = (tl.program_id(0) // num_blocks).to(tl.int64), (tl.program_id(0) % num_blocks) * frames
    column = tl.arange(0, columns)
    head, value = column // width, column % width
    is_value, of_dim = (head < num_heads) & (value < head_dim), head * head_dim + value
    bias = tl.zeros((columns,), tl.float32)
    if has_bias:
        bias = tl.load(in_bias + slot * dim + of_dim, mask=is_value, other=0.0).to(tl.float32)
    of_content = tl.load(biases + of_dim, mask=is_value, other=0.0).to(tl.float32) + bias
    of_position = tl.load(biases + dim + of_dim, mask=is_value, other=0.0).to(tl.float32) + bias
    num_utterances = tl.num_programs(0) // num_blocks
    for frame in range(0, frames):
        row = start + frame
        pointer = qkv + ((utterance * num_frames + row) * 3 + slot) * dim + of_dim
        is_read = is_value & (row < num_frames)
        found = tl.load(pointer, mask=is_read, other=0.0).to(tl.float32)
        if slot == 0:
            is_stored = (head < num_heads) & (row < num_frames)
            offset = ((utterance * num_heads + head) * num_frames + row) * width + value
            query = tl.where(is_read, (found + of_content) * scale, 0.0)
            tl.store(content + offset, query.to(content.dtype.element_ty), mask=is_stored)
            offset = ((head * num_utterances + utterance) * num_frames + row) * width + value
            query = tl.where(is_read, (found + of_position) * scale, 0.0)
            tl.store(position + offset, query.to(content.dtype.element_ty), mask=is_stored)
        else:
            is_stored = (head < num_heads) & (row < num_keys)
            offset = ((utterance * num_heads + head) * num_keys + row) * width + value
            copied = tl.where(is_read, found + bias, 0.0).to(keys.dtype.element_ty)
            tl.store(keys + offset, copied, mask=is_stored & (slot == 1))
            tl.store(values + offset, copied, mask=is_stored & (slot == 2))


@triton.jit(do_not_specialize=_SIZES)
@no_type_check
def join_kernel(
    of_content,
    of_position,
    of_keys,
    of_values,
    of_qkv,
    partial_sums,
    num_frames,
    num_keys,
    scale,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    frames: tl.constexpr,
    columns: tl.constexpr,
):
    """Copies gradients of `frames` rows of queries, keys or values of an utterance, and sums them."""
    num_blocks, slot, dim = tl.cdiv(num_frames, frames), tl.program_id(1), num_heads * head_dim
    utterance, start = (tl.program_id(0) // num_blocks).to(tl.int64), (tl.program_id(0) % num_blocks) * frames
    num_utterances = tl.num_programs(0) // num_blocks
    column = tl.arange(0, columns)
    head, value, is_value = column // head_dim, column % head_dim, column < dim
    by_content = tl.zeros((columns,), tl.float32)
    by_position = by_content
    for frame in range(0, frames):
        row = start + frame
        is_read = is_value & (row < num_frames)
        if slot == 0:
            offset = ((utterance * num_heads + head) * num_frames + row) * width + value
            one = tl.load(of_content + offset, mask=is_read, other=0.0).to(tl.float32) * scale
            offset = ((head * num_utterances + utterance) * num_frames + row) * width + value
            other = tl.load(of_position + offset, mask=is_read, other=0.0).to(tl.float32) * scale
        else:
            offset = ((utterance * num_heads + head) * num_keys + row) * width + value
            one = tl.load(of_keys + offset, mask=is_read & (slot == 1), other=0.0).to(tl.float32)
            other = tl.load(of_values + offset, mask=is_read & (slot == 2), other=0.0).to(tl.float32)
        pointer = of_qkv + ((utterance * num_frames + row) * 3 + slot) * dim + column
        tl.store(pointer, (one + other).to(of_qkv.dtype.element_ty), mask=is_read)
        by_content += one
        by_position += other
    pointer = partial_sums + tl.program_id(0).to(tl.int64) * 5 * dim + column
    tl.store(pointer + slot * dim, by_content + by_position, mask=is_value)
    if slot == 0:
        tl.store(pointer + 3 * dim, by_content, mask=is_value)
        tl.store(pointer + 4 * dim, by_position, mask=is_value)
