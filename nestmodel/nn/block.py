"""One block of the encoder: feed-forward, attention, convolution, feed-forward."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int32
from torch import Tensor, nn

from nestmodel.config import EncoderConfig
from nestmodel.nn.attention import Frames, RelPositionAttention
from nestmodel.nn.convolution import ConvModule
from nestmodel.nn.dropout import Dropout, Key

KEYS_PER_BLOCK = 7
"""Keys of a block's dropout: within and after each feed-forward, of attention weights, after attention, convolution."""

BlockKeys = Int32[Tensor, "7 2"]


class BlockCache(NamedTuple):
    """Cached values of a block from earlier frames."""

    attention: Float[Tensor, "2 batch heads cached_frames head_dim"]
    """Keys and values of attention."""

    convolution: Float[Tensor, "batch cached_frames dim"]
    """Input of the depthwise convolution."""


class FeedForward(nn.Module):
    """Two linear layers with Swish and dropout between them."""

    def __init__(self, config: EncoderConfig, *, counts_from: int = 0) -> None:
        """Builds the layers; `counts_from` is for their dropout, see `nestmodel.nn.dropout.drop`."""
        super().__init__()
        hidden = config.d_model * config.ff_expansion
        self.linear1 = nn.Linear(config.d_model, hidden, bias=config.use_bias)
        self.linear2 = nn.Linear(hidden, config.d_model, bias=config.use_bias)
        self.dropout = Dropout(config.dropout, counts_from=counts_from)

    def forward(
        self, x: Float[Tensor, "batch enc_frames dim"], key: Key | None = None
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Transforms each frame independently; `key` determines the dropout, see `Dropout`."""
        out: Tensor = self.linear2(self.dropout(F.silu(self.linear1(x)), key))
        return out


class ConformerBlock(nn.Module):
    """Half-step feed-forward, attention, convolution, and half-step feed-forward, each on a residual path.

    Source: Conformer, arXiv:2005.08100, section 2.4.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        dim = config.d_model
        self.norm_feed_forward1 = nn.LayerNorm(dim)
        self.feed_forward1 = FeedForward(config)
        self.norm_self_att = nn.LayerNorm(dim)
        self.self_attn = RelPositionAttention(
            dim=dim, num_heads=config.num_heads, dropout=config.dropout_att, use_bias=config.use_bias
        )
        self.norm_conv = nn.LayerNorm(dim)
        self.conv = ConvModule(config)
        self.norm_feed_forward2 = nn.LayerNorm(dim)
        self.feed_forward2 = FeedForward(config, counts_from=1)
        self.norm_out = nn.LayerNorm(dim)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "batch enc_frames dim"],
        frames: Frames,
        keys: BlockKeys | None = None,
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Applies the block.

        Args:
            x: Encoder frames.
            frames: Their positions and padding, from `describe_frames`.
            keys: The keys of this block from `ConformerEncoder.draw_keys`.
        """
        within1, after1, within_att, after_att, after_conv, within2, after2 = split_keys(keys, KEYS_PER_BLOCK)
        half = self.feed_forward1(self.norm_feed_forward1(x), within1)
        x = torch.add(x, self.dropout(half, after1), alpha=0.5)
        x = x + self.dropout(self.self_attn(self.norm_self_att(x), frames, within_att), after_att)
        x = x + self.dropout(self.conv(self.norm_conv(x), frames), after_conv)
        half = self.feed_forward2(self.norm_feed_forward2(x), within2)
        x = torch.add(x, self.dropout(half, after2), alpha=0.5)
        out: Tensor = self.norm_out(x)
        return out

    def extend(
        self,
        x: Float[Tensor, "batch new_frames dim"],
        cache: BlockCache,
        positions: Float[Tensor, "positions dim"],
        is_masked_key: Bool[Tensor, "#batch 1 new_frames keys"],
    ) -> tuple[Float[Tensor, "batch new_frames dim"], BlockCache]:
        """Applies the block to new frames in eval mode; see `ConformerEncoder.extend`.

        Args:
            x: The new frames.
            cache: Cache of the frames before them.
            positions: As for `RelPositionAttention.extend`.
            is_masked_key: As for `RelPositionAttention.extend`.

        Returns:
            The output of the block for the new frames, and the cache with all frames.
        """
        x = torch.add(x, self.feed_forward1(self.norm_feed_forward1(x)), alpha=0.5)
        attended, attention = self.self_attn.extend(self.norm_self_att(x), cache.attention, positions, is_masked_key)
        x = x + attended
        convolved, convolution = self.conv.extend(self.norm_conv(x), cache.convolution)
        x = x + convolved
        x = torch.add(x, self.feed_forward2(self.norm_feed_forward2(x)), alpha=0.5)
        return self.norm_out(x), BlockCache(attention, convolution)


def split_keys(keys: Int32[Tensor, "keys *rest 2"] | None, number: int) -> Sequence[Int32[Tensor, "*rest 2"] | None]:
    """Returns `number` single keys; each is None if `keys` is None."""
    return [None] * number if keys is None else keys.unbind()
