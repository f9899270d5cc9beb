"""One block of the encoder: feed-forward, attention, convolution, feed-forward.

A block can be compiled: `transform` is all of it but the conversion of its weights.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int32
from torch import Tensor, nn

from nestmodel.config import EncoderConfig
from nestmodel.nn.attention import RelPositionAttention
from nestmodel.nn.convolution import ConvModule
from nestmodel.nn.dropout import Dropout, Key
from nestmodel.nn.frames import Frames
from nestmodel.nn.gpu import devices
from nestmodel.nn.gpu.cast_weights import FusedParameters, Weights, cast_weights, fused_parameters, uncast_weights

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
        """Builds the layers; `counts_from` is that of their dropout, see `nestmodel.nn.dropout.drop`."""
        super().__init__()
        hidden = config.d_model * config.ff_expansion
        self.linear1 = nn.Linear(config.d_model, hidden, bias=config.use_bias)
        self.linear2 = nn.Linear(hidden, config.d_model, bias=config.use_bias)
        self.dropout = Dropout(config.dropout, counts_from=counts_from)

    def fused_parameters(self) -> list[FusedParameters]:
        """Returns the layers, none of which are joined."""
        return [fused_parameters(self.linear1), fused_parameters(self.linear2)]

    def forward(
        self, x: Float[Tensor, "batch enc_frames dim"], weights: Weights | None = None, key: Key | None = None
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Transforms each frame independently.

        Args:
            x: Encoder frames.
            weights: Replaces the parameters of `fused_parameters`.
            key: Of the dropout; see `Dropout`.
        """
        (weight1, bias1), (weight2, bias2) = weights or uncast_weights(self.fused_parameters())
        return F.linear(self.dropout(F.silu(F.linear(x, weight1, bias1)), key), weight2, bias2)


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
        self._compiled: _CompilerSettings | None = None

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
            keys: Those of the block, of `ConformerEncoder.draw_keys`.
        """
        transform = ConformerBlock.transform if self._compiled is None else _compiled_transform(self._compiled)
        return transform(self, x, frames, self.weights(x), keys)

    def compile_transform(self, *, dynamic: bool | None, combined: bool) -> None:
        """Compiles the block with torch at its first use, but not the conversion of its weights.

        The compiler would convert each weight and each of its gradients by a kernel of its own.

        Args:
            dynamic: Whether the compiled code takes any shape; None decides that at the second shape.
            combined: Whether kernels that do not depend on each other are launched as one.
        """
        self._compiled = _CompilerSettings(dynamic, combined)

    def transform(
        self,
        x: Float[Tensor, "batch enc_frames dim"],
        frames: Frames,
        weights: Sequence[Weights | None],
        keys: BlockKeys | None,
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Applies the block with the weights of `weights`; this is the part that may be compiled."""
        feed_forward1, self_attn, conv, feed_forward2 = weights
        within1, after1, within_att, after_att, after_conv, within2, after2 = split_keys(keys, KEYS_PER_BLOCK)
        half = self.feed_forward1(self.norm_feed_forward1(x), feed_forward1, within1)
        x = torch.add(x, self.dropout(half, after1), alpha=0.5)
        x = x + self.dropout(self.self_attn(self.norm_self_att(x), frames, self_attn, within_att), after_att)
        x = x + self.dropout(self.conv(self.norm_conv(x), frames, conv), after_conv)
        half = self.feed_forward2(self.norm_feed_forward2(x), feed_forward2, within2)
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
            cache: Of the frames before them.
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

    def weights(self, x: Float[Tensor, "batch enc_frames dim"]) -> Sequence[Weights | None]:
        """Returns the weights of the modules for a GPU; None on a CPU, where modules read their parameters."""
        if not devices.is_on_gpu(x):
            return [None] * 4
        modules = (self.feed_forward1, self.self_attn, self.conv, self.feed_forward2)
        return cast_weights([module.fused_parameters() for module in modules], devices.product_dtype(x))


class _CompilerSettings(NamedTuple):
    """See `ConformerBlock.compile_transform`."""

    dynamic: bool | None
    combined: bool


COMBINED: dict[str, str | int | bool | Callable[..., Any]] = {
    "combo_kernels": True,
    "combo_kernel_allow_mixed_sizes": 2,
}
"""Options of torch's compiler that join kernels of any sizes, such as the second steps of sums over frames."""


@cache
def _compiled_transform(settings: _CompilerSettings) -> Callable[..., Tensor]:
    """Returns the compiled `ConformerBlock.transform`. Blocks do not hold it, so that they can be copied."""
    options = COMBINED if settings.combined else None
    return torch.compile(ConformerBlock.transform, dynamic=settings.dynamic, options=options)


def split_keys(keys: Int32[Tensor, "keys *rest 2"] | None, number: int) -> Sequence[Int32[Tensor, "*rest 2"] | None]:
    """Returns the single keys, each of them None if there are none."""
    return [None] * number if keys is None else keys.unbind()
