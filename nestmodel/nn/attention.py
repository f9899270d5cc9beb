"""Self-attention with relative positions, as in Transformer-XL.

This module holds the attention of one layer. Valid frames attend to valid frames only, within the attention context.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nestmodel.nn.dropout import Dropout, Key
from nestmodel.nn.frames import MASKED_SCORE, Frames


class RelPositionAttention(nn.Module):
    """Multi-head self-attention whose scores depend on content and on the distance between frames.

    Source: Transformer-XL, arXiv:1901.02860, section 3.3.
    """

    def __init__(self, *, dim: int, num_heads: int, dropout: float, use_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linear_q = nn.Linear(dim, dim, bias=use_bias)
        self.linear_k = nn.Linear(dim, dim, bias=use_bias)
        self.linear_v = nn.Linear(dim, dim, bias=use_bias)
        self.linear_out = nn.Linear(dim, dim, bias=use_bias)
        self.linear_pos = nn.Linear(dim, dim, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.pos_bias_v = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "batch enc_frames dim"],
        frames: Frames,
        key: Key | None = None,
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Applies attention over the valid frames of each utterance.

        Args:
            x: Encoder frames.
            frames: Their positions and masks. Padded frames neither attend nor are attended to.
            key: Determines which attention weights are dropped.

        Returns:
            The attended frames; padded ones equal the bias of the output projection.
        """
        # (batch, enc_frames, dim) -> (batch, heads, enc_frames, head_dim)
        q, k, v = (self._split_heads(linear(x)) for linear in (self.linear_q, self.linear_k, self.linear_v))
        mixed = self._mix(q, k, v, frames.positions, frames.is_masked_key, key)
        # Masked keys of valid queries already have a weight of exactly 0. Zeroing the output of padded queries is
        # equivalent to zeroing their weights, and the tensor is smaller.
        mixed = mixed.masked_fill(frames.is_padding[:, None, :, None], 0.0)
        return self._join_heads(mixed)

    def extend(
        self,
        x: Float[Tensor, "batch new_frames dim"],
        cache: Float[Tensor, "2 batch heads cached_frames head_dim"],
        positions: Float[Tensor, "positions dim"],
        is_masked_key: Bool[Tensor, "#batch 1 new_frames keys"],
    ) -> tuple[Float[Tensor, "batch new_frames dim"], Float[Tensor, "2 batch heads keys head_dim"]]:
        """Attends from new frames to cached frames and to themselves, on any device, without dropout.

        Args:
            x: The new frames.
            cache: Keys and values of the frames before them.
            positions: `relative_positions` of all frames, for the distances keys - 1 down to 1 - new_frames.
            is_masked_key: True for cached and new frames that are not attended to.

        Returns:
            The attended new frames; and the keys and values of all frames, the cached ones first.
        """
        q, k, v = (self._split_heads(linear(x)) for linear in (self.linear_q, self.linear_k, self.linear_v))
        extended = torch.cat([cache, torch.stack([k, v])], dim=3)
        mixed = self._mix(q, extended[0], extended[1], positions, is_masked_key)
        return self._join_heads(mixed), extended

    def _mix(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys head_dim"],
        positions: Float[Tensor, "positions dim"],
        is_masked_key: Bool[Tensor, "#batch 1 #queries keys"],
        key: Key | None = None,
    ) -> Float[Tensor, "batch heads queries head_dim"]:
        """Returns the values that the queries, the last of the keys' frames, attend to."""
        p = self._split_heads(self.linear_pos(positions))
        # The queries are scaled instead of the scores, which are far larger tensors.
        scale = 1.0 / math.sqrt(q.shape[-1])
        content_q, position_q = ((q + bias.unsqueeze(1)) * scale for bias in (self.pos_bias_u, self.pos_bias_v))
        position = shift_to_distances(position_q @ p.transpose(-2, -1), k.shape[2])
        if self.training or torch.is_grad_enabled():
            scores = (content_q @ k.transpose(-2, -1)).add_(position)
            scores = scores.masked_fill_(is_masked_key, MASKED_SCORE)
            mixed: Tensor = self.dropout(scores.softmax(dim=-1), key) @ v
            return mixed
        # torch's fused kernel, which is slower when gradients are needed
        position = position.masked_fill(is_masked_key, MASKED_SCORE)
        return F.scaled_dot_product_attention(content_q, k, v, position, scale=1.0)

    def _join_heads(self, mixed: Float[Tensor, "batch heads rows head_dim"]) -> Float[Tensor, "batch rows dim"]:
        out: Tensor = self.linear_out(mixed.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x: Float[Tensor, "*batch rows dim"]) -> Float[Tensor, "*batch heads rows head_dim"]:
        return x.reshape(*x.shape[:-1], self.num_heads, -1).transpose(-3, -2)


def shift_to_distances(
    scores: Float[Tensor, "*batch enc_frames positions"], num_keys: int
) -> Float[Tensor, "*batch enc_frames keys"]:
    """Converts scores by distance (T - 1 and below) to scores by key: out[i, j] = scores[i, T - 1 - i + j].

    The wanted part of row i starts i columns to the left of that of row 0. Viewing the flattened matrix from column
    T - 1 of row 0 onwards, with rows that are one value shorter, aligns these parts without copying any value.

    Args:
        scores: At least T - 1 + `num_keys` columns.
        num_keys: Number of keys, T or more.
    """
    num_frames, num_positions = scores.shape[-2:]
    if num_positions == 1:
        return scores
    width = num_positions - 1
    aligned = scores.flatten(-2).narrow(-1, num_frames - 1, num_frames * width)
    return aligned.view(*scores.shape[:-1], width)[..., :num_keys]
