"""Attention with relative positions on a GPU: scores by matrix products, then torch's fused kernel.

This module also holds positions and masks of the frames of a batch as the code for GPUs reads them. Sizes are padded to
what the kernels take. All padding is with zeros or is masked, so finite results are exact.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nestmodel.attention_context import Context, Style
from nestmodel.nn.attention import (
    MASKED_SCORE,
    RelPositionAttention,
    mask_keys,
    relative_positions,
    shift_to_distances,
)
from nestmodel.nn.gpu.cast_weights import FusedParameters, Weights, fused_parameters
from nestmodel.nn.precision import product_dtype

KERNEL_MULTIPLE = 8
"""Fused attention and matrix products on a GPU want sizes that are multiples of this, in 16-bit types."""


class GpuFrames(NamedTuple):
    """`Frames` with masks that take one kernel to apply, in the type of the matrix products.

    The scores of attention have a multiple of 8 columns (`keys`); those past the frames are not read.
    """

    positions: Float[Tensor, "positions dim"]
    """`relative_positions` of the frames, twice as many as there are keys."""

    is_valid: Float[Tensor, "batch enc_frames 1"]
    """1 for valid frames and 0 for padded ones."""

    key_scores: Float[Tensor, "batch 1 queries keys"]
    """Added to the scores of the keys: 0 for keys that are attended to and `MASKED_SCORE` for others. With unlimited
    attention, there is one row for all queries."""


def describe_gpu_frames(
    x: Float[Tensor, "batch enc_frames dim"],
    enc_lens: Int[Tensor, " batch"],
    context: Context | None = None,
    style: Style = "regular",
) -> GpuFrames:
    """Returns what `describe_frames` returns, in the shapes and types that kernels of a GPU read."""
    (num_frames, dim), dtype = x.shape[1:], product_dtype(x)
    num_keys = round_up(num_frames)
    is_padded_key, is_masked_key = mask_keys(num_frames, num_keys, enc_lens, context, style)
    key_scores = is_masked_key.to(dtype) * MASKED_SCORE
    is_valid = (~is_padded_key[:, :num_frames]).to(dtype).unsqueeze(2)
    # More distances than needed, so that products with the encodings have a multiple of 8 columns.
    positions = relative_positions(num_frames, dim, x.device, num_distances=2 * num_keys)
    return GpuFrames(positions.to(dtype), is_valid, key_scores)


def round_up(size: int) -> int:
    """Returns the smallest multiple of 8 that is not below `size`."""
    return -(-size // KERNEL_MULTIPLE) * KERNEL_MULTIPLE


def attention_parameters(module: RelPositionAttention) -> list[FusedParameters]:
    """Returns the parameters that `attend` reads: three projections and the position biases are joined."""
    return [
        fused_parameters(module.linear_q, module.linear_k, module.linear_v),
        fused_parameters(module.linear_pos),
        ((module.pos_bias_u, module.pos_bias_v), ()),
        fused_parameters(module.linear_out),
    ]


def attend(
    module: RelPositionAttention, x: Float[Tensor, "batch enc_frames dim"], frames: GpuFrames, weights: Weights
) -> Float[Tensor, "batch enc_frames dim"]:
    """Applies `module` with torch's fused attention, whose dropout draws from the generator of the GPU.

    Args:
        module: The attention.
        x: Encoder frames.
        frames: Their positions and masks.
        weights: Of `attention_parameters`, converted by `cast_weights`.
    """
    (in_weight, in_bias), (pos_weight, _), (biases, _), (out_weight, out_bias) = weights
    x = x.to(product_dtype(x))
    mixed = fused_attention(
        F.linear(x, in_weight, in_bias).unflatten(2, (3, module.num_heads, -1)),
        F.linear(frames.positions, pos_weight).unflatten(1, (module.num_heads, -1)),
        biases.unflatten(0, (2, -1)),
        frames,
        dropout_p=module.dropout.prob if module.training else 0.0,
    )
    return F.linear(mixed.flatten(2), out_weight, out_bias)


def fused_attention(
    qkv: Float[Tensor, "batch enc_frames 3 heads head_dim"],
    positions: Float[Tensor, "positions heads head_dim"],
    biases: Float[Tensor, "2 heads head_dim"],
    frames: GpuFrames,
    *,
    dropout_p: float,
) -> Float[Tensor, "batch enc_frames heads head_dim"]:
    """Attends to the valid frames of each utterance; the output of padded frames is 0.

    Args:
        qkv: Queries, keys and values.
        positions: Projected encodings of the distances enc_frames - 1 and below, twice as many as there are keys.
        biases: Biases of the queries for the scores by content and for the scores by position.
        frames: Their masks: valid frames and scores of the keys.
        dropout_p: Probability with which attention weights are dropped.
    """
    head_dim = qkv.shape[-1]
    scale = 1.0 / math.sqrt(head_dim)
    # A memory-efficient kernel for 16-bit types exists for multiples of 8 only; for others, torch computes attention in
    # several steps. Zeros add nothing to the scores.
    padding = (0, -head_dim % KERNEL_MULTIPLE)
    if padding[1]:
        qkv, positions, biases = (F.pad(heads, padding) for heads in (qkv, positions, biases))
    q, k, v = qkv.unbind(2)
    content_q, position_q = (q + bias for bias in biases)
    scores = _position_scores(position_q * scale, positions, frames.key_scores)
    # (batch, enc_frames, heads, head_dim) -> (batch, heads, enc_frames, head_dim)
    content_q, k, v = (rows.transpose(1, 2) for rows in (content_q, k, v))
    mixed = F.scaled_dot_product_attention(content_q, k, v, scores, dropout_p=dropout_p, scale=scale)
    return mixed.transpose(1, 2)[..., :head_dim] * frames.is_valid.unsqueeze(3)


def _position_scores(
    q: Float[Tensor, "batch enc_frames heads head_dim"],
    positions: Float[Tensor, "positions heads head_dim"],
    key_scores: Float[Tensor, "batch 1 queries keys"],
) -> Float[Tensor, "batch heads enc_frames enc_frames"]:
    """Returns q[b, i, h] · positions[enc_frames - 1 - i + j, h] + key_scores[b, 0, i, j] at [b, h, i, j]."""
    # One product for each head, with the rows of all utterances: torch would copy the positions for each utterance.
    products = torch.bmm(q.flatten(0, 1).transpose(0, 1), positions.permute(1, 2, 0))
    by_distance = products.unflatten(1, (-1, q.shape[1]))
    scores: Tensor = _ScoresByKey.apply(by_distance, key_scores)  # type: ignore[no-untyped-call]  # of torch
    return scores


class _ScoresByKey(torch.autograd.Function):
    """Shifts scores by distance to scores by key, in two operations that torch's compiler takes as they are.

    Compiled for varying shapes, each value costs it several divisions by sizes: on an H100, 17 and 9 times the time of
    code for one shape, and a quarter of a step of `large`.
    """

    @staticmethod
    def forward(ctx: Any, by_distance: Tensor, key_scores: Tensor) -> Tensor:
        ctx.num_positions = by_distance.shape[-1]
        scores: Tensor = scores_by_key(by_distance, key_scores)
        # A view whose rows start at multiples of 8 values, as fused attention wants. Strides are computed from the
        # sizes: the compiler takes those of dimensions of size 1 for others', and would copy a slice.
        num_utterances, num_heads, num_frames, num_keys = scores.shape
        strides = (num_heads * num_frames * num_keys, num_frames * num_keys, num_keys, 1)
        return scores.as_strided((num_utterances, num_heads, num_frames, num_frames), strides)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gradients_by_distance(grads[0], ctx.num_positions), None


@torch.library.custom_op("nestmodel::scores_by_key", mutates_args=())
def scores_by_key(by_distance: Tensor, key_scores: Tensor) -> Tensor:
    """Returns by_distance[h, b, i, enc_frames - 1 - i + j] + key_scores[b, 0, i, j] at [b, h, i, j].

    Args:
        by_distance: Scores, of shape (heads, batch, enc_frames, positions).
        key_scores: Of `GpuFrames`: (batch, 1, enc_frames or 1, keys).
    """
    shifted = shift_to_distances(by_distance, key_scores.shape[-1]).transpose(0, 1)
    return torch.add(shifted, key_scores, out=shifted.new_empty(shifted.shape))


@torch.library.custom_op("nestmodel::gradients_by_distance", mutates_args=())
def gradients_by_distance(grads: Tensor, num_positions: int) -> Tensor:
    """Returns the gradient of `scores_by_key` with respect to `by_distance`.

    Args:
        grads: Gradients of the scores of all frames, of shape (batch, heads, enc_frames, enc_frames).
        num_positions: Last size of `by_distance`.
    """
    num_utterances, num_heads, num_frames, num_keys = grads.shape
    by_distance = grads.new_zeros(num_heads, num_utterances, num_frames, num_positions)
    shift_to_distances(by_distance, num_keys).transpose(0, 1).copy_(grads)  # a view
    return by_distance


@scores_by_key.register_fake
def _(by_distance: Tensor, key_scores: Tensor) -> Tensor:
    num_heads, num_utterances, num_frames, _ = by_distance.shape
    return by_distance.new_empty(num_utterances, num_heads, num_frames, key_scores.shape[-1])


@gradients_by_distance.register_fake
def _(grads: Tensor, num_positions: int) -> Tensor:
    num_utterances, num_heads, num_frames, _ = grads.shape
    return grads.new_empty(num_heads, num_utterances, num_frames, num_positions)
