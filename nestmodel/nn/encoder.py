"""FastConformer encoder: subsampling, then conformer blocks.

Modules and parameters are named as in NeMo's state dict. In eval mode, the valid frames of an utterance do not
depend on its padding or on the other utterances of its batch, except for rounding. In training mode, batch norm
computes its statistics over the whole batch including padding, as in NeMo.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch._dynamo as dynamo
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nestmodel.attention_context import Context, draw_context
from nestmodel.config import EncoderConfig
from nestmodel.nn.attention import Frames, describe_frames, relative_positions, visible_keys
from nestmodel.nn.backend import KERNELS, Backend, why_not_compiled
from nestmodel.nn.block import KEYS_PER_BLOCK, BlockCache, ConformerBlock, split_keys
from nestmodel.nn.compiler import allow_shapes, compile_backward_in_forward
from nestmodel.nn.convolution import ConvModule
from nestmodel.nn.dropout import Dropout, draw_keys
from nestmodel.nn.encoder_base import Encoder, EncoderOutput, HiddenStates
from nestmodel.nn.gpu import devices
from nestmodel.nn.gpu.block import AcceleratedConformerBlock
from nestmodel.nn.gpu.check import has_block_kernels
from nestmodel.nn.gpu.dropout import drop_on_gpu
from nestmodel.nn.gpu.relative_attention import GpuFrames, describe_gpu_frames
from nestmodel.nn.gpu.subsampling import AcceleratedConvSubsampling
from nestmodel.nn.precision import is_autocast

DropoutKeys = Int32[Tensor, "blocks_and_input 7 2"]
"""Keys of all dropout of an encoder. Two keys of the first row are used, for the blocks' input and positions."""


class ConformerEncoder(Encoder):
    """Encodes feature frames as encoder frames.

    Source: FastConformer, arXiv:2305.05084, as used by NEST (arXiv:2408.13106).
    """

    backend = KERNELS
    """What computes the layers on a GPU; see `use_backend`."""

    def __init__(self, config: EncoderConfig, *, num_mels: int) -> None:
        super().__init__()
        self.config = config
        self.dim, self.subsampling_factor = config.d_model, config.subsampling_factor
        self.num_layers = config.num_layers
        self.input_scale = math.sqrt(config.d_model) if config.xscaling else 1.0
        self.pre_encode = AcceleratedConvSubsampling(
            num_mels=num_mels,
            channels=config.subsampling_channels,
            factor=config.subsampling_factor,
            dim=config.d_model,
            is_causal=config.causal_downsampling,
        )
        self.dropout_pre_encoder = Dropout(config.dropout_pre_encoder)
        self.dropout_emb = Dropout(config.dropout_emb)
        self.layers = nn.ModuleList(AcceleratedConformerBlock(config) for _ in range(config.num_layers))

    def draw_keys(self, seed: int) -> DropoutKeys:
        """Returns keys on the CPU, which determine what dropout drops in one forward pass."""
        return draw_keys(seed, len(self.layers) + 1, KEYS_PER_BLOCK)

    def draw_context(self, seed: int) -> Context | None:
        """Returns the attention context of one forward pass in training; None if there is only one to choose from."""
        contexts = self.config.att_context_size
        return draw_context(contexts, self.config.att_context_probs, seed) if len(contexts) > 1 else None

    def describe(
        self, x: Float[Tensor, "batch enc_frames dim"], enc_lens: Int[Tensor, " batch"], context: Context | None = None
    ) -> Frames | GpuFrames:
        """Returns positions and masks of encoder frames for all blocks; `context` is as in `forward`."""
        has_kernels = self.backend.kernels and devices.is_on_gpu(x) and has_block_kernels(self.config, x)
        describe: Callable[..., Frames | GpuFrames] = describe_gpu_frames if has_kernels else describe_frames
        if not self.config.is_limited:
            return describe(x, enc_lens)
        # If one of several contexts has no limits, its mask has the shape of the others, for compiled blocks.
        return describe(x, enc_lens, context or self.config.att_context_size[0], self.config.att_context_style)

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
        self,
        feats: Float[Tensor, "batch mels frames"],
        feat_lens: Int[Tensor, " batch"],
        context: Context | None = None,
    ) -> HiddenStates:
        """Encodes features and returns the output of every block; the last one equals the output of `forward`.

        Args:
            feats: Features, masked or not.
            feat_lens: Number of valid frames of each utterance.
            context: As in `forward`.
        """
        x, enc_lens = self.pre_encode(feats, feat_lens)
        return HiddenStates(list(self._outputs(x, enc_lens, context=context)), enc_lens)

    def start(self, batch: int, device: torch.device, num_cached: int = 0) -> list[BlockCache]:
        """Returns the caches of all blocks before the first frame.

        Args:
            batch: Number of streams.
            device: Their device.
            num_cached: Number of empty frames in the cache of attention, which `is_empty` must mask.
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
            caches: Caches of the frames before them.
            context: Attention context; its left side is limited, and its right side is 0 or counts frames of a chunk.
            is_empty: True for frames, the cached ones first, that are not valid; by default, all are valid.

        Returns:
            The output of the last block for the new frames, and the caches for the next ones.
        """
        num_new, num_keys = x.shape[1], caches[0].attention.shape[3] + x.shape[1]
        positions = relative_positions(num_keys, x.shape[2], x.device, num_distances=num_keys + num_new)
        # The first cached frame is the first frame of a chunk, so chunks may be counted from it.
        is_visible = visible_keys(num_keys, context, self.config.att_context_style, x.device)
        is_masked = ~is_visible[None, None, num_keys - num_new :]
        if is_empty is not None:
            is_masked = is_masked | is_empty[:, None, None, :]
        x, extended = x * self.input_scale, []
        for layer, of_block in zip(self.layers, caches, strict=True):
            assert isinstance(layer, ConformerBlock)
            x, (attention, convolution) = layer.extend(x, of_block, positions, is_masked)
            # A copy, because a view would keep the memory of the frames that it leaves out.
            attention = attention[:, :, :, max(0, num_keys - context[0]) :].clone()
            extended.append(BlockCache(attention, convolution))
        return x, extended

    def use_backend(self, backend: Backend) -> None:
        """Sets what computes the layers. Blocks are compiled at their first use, and share the compiled code."""
        self.backend = self.pre_encode.backend = backend
        is_compiled = backend.compiled and not why_not_compiled(self.config)
        if is_compiled:
            # Torch would split the graph of a block where a gradient bucket of DDP ends, to overlap communication
            # within the block. Blocks are compiled one by one, so communication overlaps with other blocks anyway.
            dynamo.config.optimize_ddp = False
            compile_backward_in_forward()
            allow_shapes(backend.num_shapes)
        for layer in self.layers:
            assert isinstance(layer, AcceleratedConformerBlock)
            layer.backend = replace(backend, compiled=is_compiled)

    def _outputs(
        self,
        x: Float[Tensor, "batch enc_frames dim"],
        enc_lens: Int[Tensor, " batch"],
        keys: DropoutKeys | None = None,
        context: Context | None = None,
    ) -> Iterator[Float[Tensor, "batch enc_frames dim"]]:
        before_blocks, *of_blocks = split_keys(keys, len(self.layers) + 1)
        key_input, key_positions, *_ = split_keys(before_blocks, KEYS_PER_BLOCK)
        frames = self.describe(x, enc_lens, context)
        drop = drop_on_gpu if isinstance(frames, GpuFrames) else Dropout.__call__
        x = drop(self.dropout_pre_encoder, x * self.input_scale, key_input)
        if is_autocast(x):
            x = x.float()  # so that residual sums are float32 in the first block, as they are in the others
        yield x
        frames = frames._replace(positions=drop(self.dropout_emb, frames.positions, key_positions))
        for layer, of_block in zip(self.layers, of_blocks, strict=True):
            assert isinstance(layer, AcceleratedConformerBlock)
            if self.config.checkpoint_activations and torch.is_grad_enabled():
                contexts = _recompute_contexts(layer.conv)
                x = checkpoint(layer, x, frames, of_block, use_reentrant=False, context_fn=contexts)
            else:
                x = layer(x, frames, of_block)
            yield x


def _recompute_contexts(
    conv: ConvModule,
) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """Returns the contexts of the first forward pass and of its recomputation, which freezes statistics."""
    return lambda: (nullcontext(), conv.frozen_statistics())
