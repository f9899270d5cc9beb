"""Attention with relative positions on a GPU: scores by matrix products, then torch's fused kernel.

Sizes are padded to what the kernels take. All padding is with zeros or is masked, so finite results are exact.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from nestmodel.nn.frames import KERNEL_MULTIPLE, GpuMasks


def fused_attention(
    qkv: Float[Tensor, "batch keys 3 heads head_dim"],
    positions: Float[Tensor, "positions heads head_dim"],
    biases: Float[Tensor, "2 heads head_dim"],
    masks: GpuMasks,
    *,
    dropout_p: float,
) -> Float[Tensor, "batch enc_frames heads head_dim"]:
    """Attends to the valid frames of each utterance; the output of padded frames is 0.

    Args:
        qkv: Queries, keys and values, padded to the number of keys of the masks.
        positions: Projected encodings of the distances keys - 1 down to -keys.
        biases: Biases of the queries for the scores by content and for the scores by position.
        masks: Valid frames and scores of the keys.
        dropout_p: Probability with which attention weights are dropped.
    """
    num_frames, head_dim = masks.is_valid.shape[1], qkv.shape[-1]
    scale = 1.0 / math.sqrt(head_dim)
    # A memory-efficient kernel for 16-bit types exists for multiples of 8 only; for others, torch computes attention in
    # several steps. Zeros add nothing to the scores.
    padding = (0, -head_dim % KERNEL_MULTIPLE)
    if padding[1]:
        qkv, positions, biases = (F.pad(heads, padding) for heads in (qkv, positions, biases))
    q, k, v = qkv.unbind(2)
    content_q, position_q = (q + biases[:, None, None]).unbind(0)
    scores = _shifted_scores(position_q, positions, scale) + masks.key_scores
    # (batch, keys, heads, head_dim) -> (batch, heads, keys, head_dim)
    content_q, k, v = (rows.transpose(1, 2) for rows in (content_q, k, v))
    mixed = F.scaled_dot_product_attention(content_q, k, v, scores, dropout_p=dropout_p, scale=scale)
    return mixed.transpose(1, 2)[:, :num_frames, :, :head_dim] * masks.is_valid.unsqueeze(3)


def _shifted_scores(
    q: Float[Tensor, "batch keys heads head_dim"], positions: Float[Tensor, "positions heads head_dim"], scale: float
) -> Float[Tensor, "batch heads keys keys"]:
    """Returns the scores by distance, scaled: out[b, h, i, j] = scale · q[b, i, h] · positions[keys - 1 - i + j, h]."""
    num_rows, num_keys, num_positions = len(q), q.shape[1], len(positions)
    # One product for each head, with the rows of all utterances: torch would copy the positions for each utterance.
    # With beta = 0 the first argument is ignored.
    rows, columns = q.flatten(0, 1).transpose(0, 1), positions.permute(1, 2, 0)
    scores = torch.baddbmm(q.new_empty(1, 1, 1), rows, columns, beta=0, alpha=scale)
    # The part of row i that is needed starts i columns to the left of that of row 0: rows are read one value closer
    # together than they are stored.
    size = (num_rows, q.shape[2], num_keys, num_keys)
    strides = (num_keys * num_positions, num_rows * num_keys * num_positions, num_positions - 1, 1)
    return scores.as_strided(size, strides, num_keys - 1)
