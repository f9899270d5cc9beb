"""FastConformer encoder: subsampling, then conformer blocks.

Names of modules and parameters are those of NeMo's state dict. In eval mode, the valid frames of an utterance do not
depend on its padding or on the other utterances of its batch, except for rounding. In training mode, batch norm
computes its statistics over the whole batch including padding, as in NeMo.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nestmodel.attention_context import Context, draw_context
from nestmodel.config import EncoderConfig
from nestmodel.errors import ConfigError
from nestmodel.nn import devices
from nestmodel.nn.attention import RelPositionAttention
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.cast_weights import FusedParameters, Weights, cast_weights, fused_parameters, uncast_weights
from nestmodel.nn.dropout import Dropout, Key, draw_keys
from nestmodel.nn.frames import Frames, describe_frames, relative_positions, visible_keys
from nestmodel.nn.subsampling import ConvSubsampling
from nestmodel.representation import shapes

KEYS_PER_BLOCK = 7
"""Keys of a block's dropout: within and after each feed-forward, of attention weights, after attention, convolution."""

BlockKeys = Int32[Tensor, "7 2"]
DropoutKeys = Int32[Tensor, "blocks_and_input 7 2"]
"""Keys of all dropout of an encoder. The first row, of which two are used, is for the blocks' input and positions."""


class EncoderOutput(NamedTuple):
    """Encoder frames of a batch."""

    frames: Float[Tensor, "batch enc_frames dim"]
    """Output of the last block. Padded frames are meaningless."""

    lens: Int[Tensor, " batch"]
    """Number of valid encoder frames of each utterance."""

    def __repr__(self) -> str:
        return shapes(self)


class HiddenStates(NamedTuple):
    """Encoder frames of a batch, before the first block and after each block."""

    states: list[Float[Tensor, "batch enc_frames dim"]]
    """Input of the first block, then the output of each block: one more than there are blocks."""

    lens: Int[Tensor, " batch"]
    """Number of valid encoder frames of each utterance."""


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


class ConvModule(nn.Module):
    """Gated pointwise convolution, depthwise convolution over time, norm, Swish, pointwise convolution."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.context = config.conv_context
        dim, kernel, use_bias = config.d_model, config.conv_kernel_size, config.use_bias
        self.pointwise_conv1 = nn.Conv1d(dim, 2 * dim, 1, bias=use_bias)
        self.depthwise_conv = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim, bias=use_bias)
        # NeMo uses this name for either norm.
        self.batch_norm = StepBatchNorm(dim) if config.conv_norm == "batch_norm" else nn.LayerNorm(dim)
        self.pointwise_conv2 = nn.Conv1d(dim, dim, 1, bias=use_bias)

    def fused_parameters(self) -> list[FusedParameters]:
        """Returns the convolutions, none of which are joined."""
        return [fused_parameters(conv) for conv in (self.pointwise_conv1, self.depthwise_conv, self.pointwise_conv2)]

    def forward(
        self, x: Float[Tensor, "batch enc_frames dim"], frames: Frames, weights: Weights | None = None
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Convolves over time; padded frames are zero in the depthwise convolution.

        Args:
            x: Encoder frames.
            frames: Their padding.
            weights: Replaces the parameters of `fused_parameters`.
        """
        (weight1, bias1), depthwise, (weight2, bias2) = weights or uncast_weights(self.fused_parameters())
        x = F.glu(F.linear(x, weight1.squeeze(2), bias1), dim=2)
        x = x.masked_fill(frames.is_padding.unsqueeze(2), 0.0) if frames.gpu is None else x * frames.gpu.is_valid
        x = self._mix_frames(x, *depthwise, self.context)
        x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        return F.linear(F.silu(x), weight2.squeeze(2), bias2)

    def extend(
        self, x: Float[Tensor, "batch new_frames dim"], cache: Float[Tensor, "batch cached_frames dim"]
    ) -> tuple[Float[Tensor, "batch new_frames dim"], Float[Tensor, "batch cached_frames dim"]]:
        """Convolves new frames with those before them, in eval mode; reads none to the right.

        Args:
            x: The new frames.
            cache: Of the frames before them; zeros at the start.

        Returns:
            The convolved new frames, and the cache for the next ones.
        """
        (weight1, bias1), depthwise, (weight2, bias2) = uncast_weights(self.fused_parameters())
        extended = torch.cat([cache, F.glu(F.linear(x, weight1.squeeze(2), bias1), dim=2)], dim=1)
        x = self._mix_frames(extended, *depthwise, (0, 0))
        x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        kept = extended[:, extended.shape[1] - cache.shape[1] :].clone()
        return F.linear(F.silu(x), weight2.squeeze(2), bias2), kept

    def _mix_frames(
        self,
        x: Float[Tensor, "batch enc_frames dim"],
        weight: Tensor,
        bias: Tensor | None,
        padding: tuple[int, int],
    ) -> Float[Tensor, "batch convolved_frames dim"]:
        groups, (pad, right) = weight.shape[0], padding
        if pad != right:
            x, pad = F.pad(x, (0, 0, pad, right)), 0
        if devices.is_on_gpu(x):
            return F.conv1d(x.transpose(1, 2), weight, bias, padding=pad, groups=groups).transpose(1, 2).contiguous()
        # A 2-d convolution of one row with channels last, which is already the memory layout, takes a quarter of the
        # time on a CPU.
        image = x.transpose(1, 2).unsqueeze(2)  # (batch, dim, 1, enc_frames)
        # The gradient of its weight has other strides than the weight, in dimensions of one element. The view sets them
        # right; otherwise, DDP warns at every start.
        image = F.conv2d(image, weight.flatten(1).view(groups, 1, 1, -1), bias, padding=(0, pad), groups=groups)
        return image.squeeze(2).transpose(1, 2)

    def frozen_statistics(self) -> AbstractContextManager[None]:
        """Leaves the batch norm statistics unchanged while a forward pass is recomputed."""
        return self.batch_norm.frozen_statistics() if isinstance(self.batch_norm, StepBatchNorm) else nullcontext()


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
        within1, after1, within_att, after_att, after_conv, within2, after2 = _split_keys(keys, KEYS_PER_BLOCK)
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


def check_compilable(checkpoint_activations: bool, num_shapes: int | None) -> None:
    """Raises ConfigError if blocks cannot be compiled: activations are checkpointed, and shapes are not fixed."""
    if checkpoint_activations and num_shapes is None:
        raise ConfigError(
            "model.kernels.blocks is compiled, model.config.encoder.checkpoint_activations is on, and "
            "data.plan.num_shapes is not set. When torch stops compiling for more shapes, it can no longer recompute "
            "the activations of compiled blocks. Set data.plan.num_shapes, for example to 8, or change one of the two."
        )


class ConformerEncoder(nn.Module):
    """Encodes feature frames as encoder frames.

    Source: FastConformer, arXiv:2305.05084, as used by NEST (arXiv:2408.13106, section 3.1).
    """

    def __init__(self, config: EncoderConfig, *, num_mels: int) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = config.checkpoint_activations
        self.input_scale = math.sqrt(config.d_model) if config.xscaling else 1.0
        self.pre_encode = ConvSubsampling(
            num_mels=num_mels,
            channels=config.subsampling_channels,
            factor=config.subsampling_factor,
            dim=config.d_model,
            is_causal=config.causal_downsampling,
        )
        self.dropout_pre_encoder = Dropout(config.dropout_pre_encoder)
        self.dropout_emb = Dropout(config.dropout_emb)
        self.layers = nn.ModuleList(ConformerBlock(config) for _ in range(config.num_layers))

    def draw_keys(self, seed: int) -> DropoutKeys:
        """Returns keys on the CPU, which determine what dropout drops in one forward pass."""
        return draw_keys(seed, len(self.layers) + 1, KEYS_PER_BLOCK)

    def draw_context(self, seed: int) -> Context | None:
        """Returns the attention context of one forward pass in training; None if there is only one to choose from."""
        contexts = self.config.att_context_size
        return draw_context(contexts, self.config.att_context_probs, seed) if len(contexts) > 1 else None

    def describe(
        self, x: Float[Tensor, "batch enc_frames dim"], enc_lens: Int[Tensor, " batch"], context: Context | None = None
    ) -> Frames:
        """Returns positions and masks of encoder frames for all blocks; `context` is as in `forward`."""
        if not self.config.is_limited:
            return describe_frames(x, enc_lens)
        # If one of several contexts has no limits, its mask has the shape of the others, for compiled blocks.
        context = context or self.config.att_context_size[0]
        return describe_frames(x, enc_lens, context, self.config.att_context_style)

    def forward(
        self,
        feats: Float[Tensor, "batch mels frames"],
        feat_lens: Int[Tensor, " batch"],
        keys: DropoutKeys | None = None,
        context: Context | None = None,
    ) -> EncoderOutput:
        """Encodes features.

        Args:
            feats: Features, masked or not.
            feat_lens: Number of valid frames of each utterance.
            keys: From `draw_keys`; without them, dropout is drawn from torch's global generator of the device.
            context: Attention context, one of `att_context_size`; by default the first of them.
        """
        x, enc_lens = self.pre_encode(feats, feat_lens)
        return EncoderOutput(self.encode(x, enc_lens, keys, context), enc_lens)

    def encode(
        self,
        x: Float[Tensor, "batch enc_frames dim"],
        enc_lens: Int[Tensor, " batch"],
        keys: DropoutKeys | None = None,
        context: Context | None = None,
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Applies all blocks to the output of `pre_encode`, masked or not; see `forward`."""
        return deque(self._outputs(x, enc_lens, keys, context), maxlen=1).pop()

    def hidden_states(
        self, feats: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]
    ) -> HiddenStates:
        """Encodes features and returns the output of every block; the last one equals that of `forward`.

        Args:
            feats: Features, masked or not.
            feat_lens: Number of valid frames of each utterance.
        """
        x, enc_lens = self.pre_encode(feats, feat_lens)
        return HiddenStates(list(self._outputs(x, enc_lens)), enc_lens)

    def start(self, batch: int, device: torch.device, num_cached: int = 0) -> list[BlockCache]:
        """Returns the caches of all blocks before the first frame.

        Args:
            batch: Number of streams.
            device: Their device.
            num_cached: Number of frames that the cache of attention has at the start, which `is_empty` must mask.
        """
        config = self.config
        heads, dim = config.num_heads, config.d_model
        return [
            BlockCache(
                torch.zeros(2, batch, heads, num_cached, dim // heads, device=device),
                torch.zeros(batch, config.conv_context[0], dim, device=device),
            )
            for _ in self.layers
        ]

    def extend(
        self,
        x: Float[Tensor, "batch new_frames dim"],
        caches: Sequence[BlockCache],
        context: Context,
        is_empty: Bool[Tensor, "batch keys"] | None = None,
    ) -> tuple[Float[Tensor, "batch new_frames dim"], list[BlockCache]]:
        """Applies all blocks to new frames of a stream in eval mode. The convolutions must be causal.

        Args:
            x: Output of `pre_encode`: whole chunks, except at the end of the stream.
            caches: Of the frames before them.
            context: Attention context; its left side is limited, and its right side is 0 or that of a chunk.
            is_empty: True for frames, the cached ones first, that are not valid; by default all are.

        Returns:
            The output of the last block for the new frames, and the caches for the next ones.
        """
        num_new, num_keys = x.shape[1], caches[0].attention.shape[3] + x.shape[1]
        positions = relative_positions(num_keys, x.shape[2], x.device, num_distances=num_keys + num_new)
        # The first cached frame is the first one of a chunk, so chunks may be counted from there.
        is_visible = visible_keys(num_keys, num_keys, context, self.config.att_context_style, x.device)
        is_masked = ~is_visible[None, None, num_keys - num_new :]
        if is_empty is not None:
            is_masked = is_masked | is_empty[:, None, None, :]
        x, extended = x * self.input_scale, []
        for layer, of_block in zip(self.layers, caches, strict=True):
            assert isinstance(layer, ConformerBlock)
            x, (attention, convolution) = layer.extend(x, of_block, positions, is_masked)
            # A copy: a view would keep the frames that it leaves out.
            attention = attention[:, :, :, max(0, num_keys - context[0]) :].clone()
            extended.append(BlockCache(attention, convolution))
        return x, extended

    def compile_blocks(self, num_shapes: int | None, *, combined: bool = False) -> None:
        """Compiles the blocks with torch at their first use; all blocks share the compiled code.

        Args:
            num_shapes: Number of batch shapes to compile for; None compiles for varying shapes.
            combined: Whether kernels that do not depend on each other are launched as one: fewer launches, by an
                option of the compiler that few people use.

        Raises:
            ConfigError: Activations are checkpointed, and the number of shapes is None.
        """
        check_compilable(self.checkpoint_activations, num_shapes)
        # Torch would split the graph of a block where a gradient bucket of DDP ends, to overlap communication within
        # the block. Blocks are compiled one by one, so communication overlaps with other blocks anyway.
        dynamo.config.optimize_ddp = False
        if num_shapes is not None:
            # Shapes of training are compiled for the forward pass and for its recomputation, those of validation once.
            num_graphs = 3 * num_shapes + 2
            dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, num_graphs)
            dynamo.config.accumulated_recompile_limit = max(dynamo.config.accumulated_recompile_limit, num_graphs)
        for layer in self.layers:
            assert isinstance(layer, ConformerBlock)
            layer.compile_transform(dynamic=None if num_shapes is None else False, combined=combined)

    def _outputs(
        self,
        x: Float[Tensor, "batch enc_frames dim"],
        enc_lens: Int[Tensor, " batch"],
        keys: DropoutKeys | None = None,
        context: Context | None = None,
    ) -> Iterator[Float[Tensor, "batch enc_frames dim"]]:
        before_blocks, *of_blocks = _split_keys(keys, len(self.layers) + 1)
        key_input, key_positions, *_ = _split_keys(before_blocks, KEYS_PER_BLOCK)
        x = self.dropout_pre_encoder(x * self.input_scale, key_input)
        if devices.is_autocast(x):
            x = x.float()  # so that the sums of the residual paths are float32 in the first block as in the others
        yield x
        frames = self.describe(x, enc_lens, context)
        frames = frames._replace(positions=self.dropout_emb(frames.positions, key_positions))
        for layer, of_block in zip(self.layers, of_blocks, strict=True):
            assert isinstance(layer, ConformerBlock)
            if self.checkpoint_activations and torch.is_grad_enabled():
                contexts = _recompute_contexts(layer.conv)
                x = checkpoint(layer, x, frames, of_block, use_reentrant=False, context_fn=contexts)
            else:
                x = layer(x, frames, of_block)
            yield x


def _split_keys(keys: Int32[Tensor, "keys *rest 2"] | None, number: int) -> Sequence[Int32[Tensor, "*rest 2"] | None]:
    return [None] * number if keys is None else keys.unbind()


def _recompute_contexts(
    conv: ConvModule,
) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """Returns the contexts of the first forward pass and of its recomputation, which freezes statistics."""
    return lambda: (nullcontext(), conv.frozen_statistics())
