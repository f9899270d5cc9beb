"""The softmax of attention with relative positions as one kernel of a GPU for each direction.

A program processes whole rows of scores. It reads the scores by position without moving them: the score of key j for
query i is in column frames - 1 - i + j. Masks are computed from lengths and limits.
"""

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestmodel.nn.dropout import keep_scale
from nestmodel.nn.gpu.devices import launch
from nestmodel.nn.gpu.dropout_kernel import is_kept

LOG2_OF_E = tl.constexpr(1 / math.log(2))

_SIZES = ["num_utterances", "num_frames", "num_eights"]
"""Sizes that differ from batch to batch, for which the kernels are not compiled again."""


def launch_weights(
    scores: Tensor, by_distance: Tensor, lens: Tensor, limits: Tensor | None, key: Tensor | None, num_dropped: int
) -> tuple[Tensor, Tensor]:
    """Computes the weights of attention before and after dropout. The weights before it overwrite `scores`.

    Rows of padded queries, and columns past the valid keys, are zero.

    Args:
        scores: Scores by content: (batch, heads, enc_frames, keys). The number of keys is a multiple of 8.
        by_distance: Scores by position: (heads, batch * enc_frames, 2 * keys).
        lens: As in `GpuFrames`.
        limits: As in `GpuFrames`.
        key: Key of the dropout; None drops nothing.
        num_dropped: Probability with which a weight is dropped, times 65536.
    """
    kept = scores if key is None else torch.empty_like(scores)
    sizes = constants(scores.shape[3], key is not None)
    launch(
        weights_kernel, _grid(scores, sizes), scores, by_distance, lens, limits, key, kept, *_sizes(scores),
        num_dropped, keep_scale(num_dropped), limits is not None, **sizes,
    )  # fmt: skip
    return scores, kept


def launch_gradients(
    weights: Tensor, grad: Tensor, key: Tensor | None, num_dropped: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of the scores by content and by distance; and the weights after dropout once more.

    Args:
        weights: Weights before dropout.
        grad: Gradient of the weights after dropout; overwritten with the gradient of the scores by content.
        key: As for `launch_weights`.
        num_dropped: As for `launch_weights`.
    """
    num_utterances, num_heads, num_frames, num_keys = weights.shape
    kept = weights if key is None else torch.empty_like(weights)
    sizes = num_heads, num_utterances * num_frames, 2 * num_keys
    by_distance = torch.empty(sizes, dtype=weights.dtype, device=weights.device)
    options = constants(num_keys, key is not None)
    launch(
        gradients_kernel, _grid(weights, options), weights, grad, key, kept, by_distance, *_sizes(weights),
        num_dropped, keep_scale(num_dropped), **options,
    )  # fmt: skip
    return grad, by_distance, kept


def constants(num_keys: int, drops: bool) -> dict[str, int | bool]:
    """Returns the constant arguments of a kernel, and its number of warps: a thread holds 16 values, or 32 at most."""
    columns = max(32, triton.next_power_of_2(num_keys))
    return {
        "drops": drops,
        "rows": max(1, 1024 // columns),
        "columns": columns,
        "num_warps": min(16, max(1, columns // 512)),
    }


def _grid(scores: Tensor, sizes: dict[str, int | bool]) -> tuple[int]:
    num_utterances, num_heads, num_frames, _ = scores.shape
    return (num_utterances * num_heads * triton.cdiv(num_frames, sizes["rows"]),)


def _sizes(scores: Tensor) -> tuple[int, ...]:
    num_utterances, num_heads, num_frames, num_keys = scores.shape
    return num_utterances, num_heads, num_frames, num_keys // 8


@triton.jit
@no_type_check
def find_rows(num_utterances, num_heads, num_frames, rows: tl.constexpr):
    """Returns the utterance of a program, its queries, and their rows in all scores and in scores by distance."""
    num_blocks = tl.cdiv(num_frames, rows)
    matrix = tl.program_id(0) // num_blocks
    query = (tl.program_id(0) % num_blocks) * rows + tl.arange(0, rows)
    utterance, head = matrix // num_heads, matrix % num_heads
    in_positions = head * num_utterances + utterance
    return utterance, query, matrix.to(tl.int64) * num_frames + query, in_positions.to(tl.int64) * num_frames + query


@triton.jit
@no_type_check
def keep(row, column, num_frames, key, num_dropped):
    """Returns which weights dropout keeps. Positions are counted without the columns that fill up rows.

    Decisions repeat after 2^32 weights.
    """
    position = row.to(tl.uint32)[:, None] * num_frames.to(tl.uint32) + column.to(tl.uint32)[None, :]
    return is_kept(position, key, num_dropped)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["key"])
@no_type_check
def weights_kernel(
    scores,
    by_distance,
    lens,
    limits,
    key,
    kept,
    num_utterances,
    num_heads,
    num_frames,
    num_eights,
    num_dropped,
    scale,
    is_limited: tl.constexpr,
    drops: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Computes the weights of `rows` queries; rows of padded queries, and columns past the valid keys, are zero."""
    utterance, query, row, in_positions = find_rows(num_utterances, num_heads, num_frames, rows)
    column = tl.arange(0, columns)
    num_valid = tl.load(lens + utterance).to(tl.int32)
    is_seen = (query < num_valid)[:, None] & (column < num_valid)[None, :]
    if is_limited:
        num_left, num_right, chunk = tl.load(limits), tl.load(limits + 1), tl.load(limits + 2)
        distance = (query // chunk)[:, None] - (column // chunk)[None, :]
        is_seen = is_seen & (distance <= num_left) & (distance >= -num_right)
    num_keys = num_eights * 8  # so the compiler knows that rows are multiples of 8, and reads 8 values at once
    offset = row[:, None] * num_keys + column[None, :]
    shifted = by_distance + (in_positions * 2 * num_keys + num_frames - 1 - query)[:, None] + column[None, :]
    is_stored = (query < num_frames)[:, None] & (column < num_keys)[None, :]
    score = tl.load(scores + offset, mask=is_stored, other=0.0).to(tl.float32)
    score += tl.load(shifted, mask=is_seen, other=0.0).to(tl.float32)
    score = tl.where(is_seen, score * LOG2_OF_E, float("-inf"))
    highest = tl.max(score, 1)
    power = tl.exp2(score - tl.where(query < num_valid, highest, 0.0)[:, None])
    total = tl.sum(power, 1)
    weight = power * (1.0 / tl.where(query < num_valid, total, 1.0))[:, None]
    tl.store(scores + offset, weight.to(scores.dtype.element_ty), mask=is_stored)
    if drops:
        weight = tl.where(keep(row, column, num_frames, key, num_dropped), weight * scale, 0.0)
        tl.store(kept + offset, weight.to(kept.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["key"])
@no_type_check
def gradients_kernel(
    weights,
    grad,
    key,
    kept,
    by_distance,
    num_utterances,
    num_heads,
    num_frames,
    num_eights,
    num_dropped,
    scale,
    drops: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Computes the gradients of the scores of `rows` queries, by key and by distance, and the weights after dropout."""
    _, query, row, in_positions = find_rows(num_utterances, num_heads, num_frames, rows)
    column = tl.arange(0, columns)
    num_keys = num_eights * 8  # so the compiler knows that rows are multiples of 8, and reads 8 values at once
    is_read = (query < num_frames)[:, None] & (column < num_keys)[None, :]
    offset = row[:, None] * num_keys + column[None, :]
    weight = tl.load(weights + offset, mask=is_read, other=0.0).to(tl.float32)
    given = tl.load(grad + offset, mask=is_read, other=0.0).to(tl.float32)
    if drops:
        is_left = keep(row, column, num_frames, key, num_dropped)
        given = tl.where(is_left, given * scale, 0.0)
        tl.store(kept + offset, tl.where(is_left, weight * scale, 0.0).to(kept.dtype.element_ty), mask=is_read)
    of_score = (weight * (given - tl.sum(weight * given, 1)[:, None])).to(grad.dtype.element_ty)
    tl.store(grad + offset, of_score, mask=is_read)
    # Gradients at distances without a key are zero. Writing aligned rows of zeros takes a fraction of the instructions
    # that zeros before and after the scores would take.
    pointer = by_distance + (in_positions * 2 * num_keys)[:, None] + column[None, :]
    zeros = tl.zeros((rows, columns), grad.dtype.element_ty)
    tl.store(pointer, zeros, mask=is_read)
    tl.store(pointer + num_keys, zeros, mask=is_read)
    tl.debug_barrier()
    tl.store(pointer + (num_frames - 1 - query)[:, None], of_score, mask=is_read)
