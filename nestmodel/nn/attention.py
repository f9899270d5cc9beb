"""Self-attention with relative positions, as in Transformer-XL.

This module holds the attention of one layer, and the positions and masks of the frames of a batch, which are computed
once for all layers. Valid frames attend to valid frames only, within the attention context.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nestmodel.attention_context import UNLIMITED, Context, Style
from nestmodel.nn.dropout import Dropout, Key
from nestmodel.nn.precision import product_dtype

MASKED_SCORE = -10000.0
"""Score of a masked key. Its exponential is 0 in every floating-point format."""


class Frames(NamedTuple):
    """Positions and padding of the frames of a batch."""

    positions: Float[Tensor, "positions dim"]
    """`relative_positions` of the frames."""

    is_padding: Bool[Tensor, "batch enc_frames"]
    """True past the valid frames."""

    is_masked_key: Bool[Tensor, "batch 1 queries keys"]
    """True for keys that are not attended to. With unlimited attention, there is one row for all queries."""


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


def describe_frames(
    x: Float[Tensor, "batch enc_frames dim"],
    enc_lens: Int[Tensor, " batch"],
    context: Context | None = None,
    style: Style = "regular",
) -> Frames:
    """Returns positions, in the type of matrix products, and masks.

    With limited attention, the mask has batch * enc_frames * keys values, as many as a block has scores for each head.
    All blocks share it.

    Args:
        x: Input of the first block.
        enc_lens: Number of valid frames of each utterance.
        context: Attention context, as for `visible_keys`; None sets no limit, and the mask is smaller.
        style: How the context is counted.
    """
    num_frames, dim = x.shape[1:]
    is_padding = torch.arange(num_frames, device=enc_lens.device) >= enc_lens.unsqueeze(1)
    is_masked_key = is_padding[:, None, None, :]
    if context is not None:
        is_masked_key = is_masked_key | ~visible_keys(num_frames, context, style, enc_lens.device)
    positions = relative_positions(num_frames, dim, x.device).to(product_dtype(x))
    return Frames(positions, is_padding, is_masked_key)


def visible_keys(
    num_frames: int, context: Context, style: Style, device: torch.device | None = None
) -> Bool[Tensor, "queries keys"]:
    """Returns True where a query attends to a key, by an attention context; padding is not considered.

    Args:
        num_frames: Number of encoder frames, which are queries and keys.
        context: Numbers of encoder frames to the left and to the right, `UNLIMITED` for no limit.
        style: With `regular`, query i attends to the keys i - left to i + right. With `chunked_limited`, frames are in
            chunks of right + 1, and a query attends to all keys of its own chunk and of the left / (right + 1) chunks
            before it. A context with an unlimited right side has no chunks.
        device: Device of the mask.

    Source: `ConformerEncoder._create_masks` of NeMo 3.0.0.
    """
    left, right, chunk = in_chunks(context, style)
    numbers = torch.arange(num_frames, device=device) // chunk
    distance = numbers.unsqueeze(1) - numbers
    is_visible = torch.ones_like(distance, dtype=torch.bool)
    if left != UNLIMITED:
        is_visible &= distance <= left
    if right != UNLIMITED:
        is_visible &= distance >= -right
    return is_visible


def in_chunks(context: Context, style: Style) -> tuple[int, int, int]:
    """Returns how many chunks to the left and to the right a query attends to, and the number of frames of a chunk.

    Args:
        context: Attention context, as for `visible_keys`; unlimited sides stay unlimited.
        style: How the context is counted; only with `chunked_limited` has a chunk more than one frame.
    """
    left, right = context
    if style != "chunked_limited" or right == UNLIMITED:
        return left, right, 1
    return left if left == UNLIMITED else left // (right + 1), 0, right + 1


def relative_positions(
    num_frames: int, dim: int, device: torch.device, num_distances: int | None = None
) -> Float[Tensor, "positions dim"]:
    """Returns sinusoidal encodings of the distances num_frames - 1 down to 1 - num_frames.

    Sine and cosine are interleaved. The encodings are computed for each batch: this costs less than projecting them in
    one layer, and a cache would be state that grows.

    Args:
        num_frames: Number of encoder frames.
        dim: Dimension of an encoding.
        device: Device on which the encodings are computed.
        num_distances: Number of distances, downwards from num_frames - 1; by default 2 * num_frames - 1.

    Source: Transformer-XL, arXiv:1901.02860, appendix B.
    """
    last = -num_frames if num_distances is None else num_frames - 1 - num_distances
    distances = torch.arange(num_frames - 1, last, -1, dtype=torch.float32, device=device)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) * (-math.log(10000.0) / dim)
    angles = distances.unsqueeze(1) * exponents.exp()
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def shift_to_distances(
    scores: Float[Tensor, "*batch enc_frames positions"], num_keys: int
) -> Float[Tensor, "*batch enc_frames keys"]:
    """Converts scores by distance (T - 1 and below) to scores by key: out[i, j] = scores[i, T - 1 - i + j].

    The wanted part of row i starts i columns further left than in row 0. Viewing the flattened matrix from column T - 1
    of row 0 onwards, with rows that are one value shorter, aligns these parts without copying any value.

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
