"""FastConformer encoder: subsampling, then conformer blocks.

Names of modules and parameters are those of NeMo's state dict. In eval mode, the valid frames of an utterance do not
depend on its padding or on the other utterances of its batch, except for rounding. In training mode, batch norm
computes its statistics over the whole batch including padding, as in NeMo.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nestmodel.config import EncoderConfig
from nestmodel.nn.attention import RelPositionAttention, relative_positions
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.dropout import Dropout
from nestmodel.nn.subsampling import ConvSubsampling


class EncoderOutput(NamedTuple):
    """Encoder frames of a batch."""

    frames: Float[Tensor, "batch enc_frames dim"]
    """Output of the last block. Padded frames are meaningless."""

    lens: Int[Tensor, " batch"]
    """Number of valid encoder frames of each utterance."""


class HiddenStates(NamedTuple):
    """Encoder frames of a batch, before the first block and after each block."""

    states: list[Float[Tensor, "batch enc_frames dim"]]
    """Input of the first block, then the output of each block: one more than there are blocks."""

    lens: Int[Tensor, " batch"]
    """Number of valid encoder frames of each utterance."""


class FeedForward(nn.Module):
    """Two linear layers with Swish and dropout between them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden = config.d_model * config.ff_expansion
        self.linear1 = nn.Linear(config.d_model, hidden, bias=config.use_bias)
        self.linear2 = nn.Linear(hidden, config.d_model, bias=config.use_bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "batch enc_frames dim"]) -> Float[Tensor, "batch enc_frames dim"]:
        """Transforms each frame independently."""
        out: Tensor = self.linear2(self.dropout(F.silu(self.linear1(x))))
        return out


class ConvModule(nn.Module):
    """Gated pointwise convolution, depthwise convolution over time, norm, Swish, pointwise convolution."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        dim, kernel, use_bias = config.d_model, config.conv_kernel_size, config.use_bias
        self.pointwise_conv1 = nn.Conv1d(dim, 2 * dim, 1, bias=use_bias)
        self.depthwise_conv = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim, bias=use_bias)
        # NeMo uses this name for either norm.
        self.batch_norm = StepBatchNorm(dim) if config.conv_norm == "batch_norm" else nn.LayerNorm(dim)
        self.pointwise_conv2 = nn.Conv1d(dim, dim, 1, bias=use_bias)

    def forward(
        self, x: Float[Tensor, "batch enc_frames dim"], is_padding: Bool[Tensor, "batch enc_frames"]
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Convolves over time; padded frames are zero in the depthwise convolution."""
        x = F.glu(F.linear(x, self.pointwise_conv1.weight.squeeze(2), self.pointwise_conv1.bias), dim=2)
        x = self._mix_frames(x.masked_fill(is_padding.unsqueeze(2), 0.0))
        x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        return F.linear(F.silu(x), self.pointwise_conv2.weight.squeeze(2), self.pointwise_conv2.bias)

    def _mix_frames(self, x: Float[Tensor, "batch enc_frames dim"]) -> Float[Tensor, "batch enc_frames dim"]:
        conv = self.depthwise_conv
        if x.is_cuda:
            mixed: Tensor = conv(x.transpose(1, 2))
            return mixed.transpose(1, 2).contiguous()
        # A 2-d convolution of one row with channels last, which is already the memory layout, takes a quarter of the
        # time on a CPU.
        padding = (0, conv.kernel_size[0] // 2)
        image = x.transpose(1, 2).unsqueeze(2)  # (batch, dim, 1, enc_frames)
        image = F.conv2d(image, conv.weight.unsqueeze(2), conv.bias, padding=padding, groups=conv.groups)
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
        self.feed_forward2 = FeedForward(config)
        self.norm_out = nn.LayerNorm(dim)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "batch enc_frames dim"],
        positions: Float[Tensor, "positions dim"],
        is_padding: Bool[Tensor, "batch enc_frames"],
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Applies the block; for `positions` and `is_padding` see `RelPositionAttention.forward`."""
        x = torch.add(x, self.dropout(self.feed_forward1(self.norm_feed_forward1(x))), alpha=0.5)
        x = x + self.dropout(self.self_attn(self.norm_self_att(x), positions, is_padding))
        x = x + self.dropout(self.conv(self.norm_conv(x), is_padding))
        x = torch.add(x, self.dropout(self.feed_forward2(self.norm_feed_forward2(x))), alpha=0.5)
        out: Tensor = self.norm_out(x)
        return out


class ConformerEncoder(nn.Module):
    """Encodes feature frames as encoder frames.

    Source: FastConformer, arXiv:2305.05084, as used by NEST (arXiv:2408.13106, section 3.1).
    """

    def __init__(self, config: EncoderConfig, *, num_mels: int) -> None:
        super().__init__()
        self.checkpoint_activations = config.checkpoint_activations
        self.input_scale = math.sqrt(config.d_model) if config.xscaling else 1.0
        self.pre_encode = ConvSubsampling(
            num_mels=num_mels,
            channels=config.subsampling_channels,
            factor=config.subsampling_factor,
            dim=config.d_model,
        )
        self.dropout_pre_encoder = Dropout(config.dropout_pre_encoder)
        self.dropout_emb = Dropout(config.dropout_emb)
        self.layers = nn.ModuleList(ConformerBlock(config) for _ in range(config.num_layers))

    def forward(self, feats: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]) -> EncoderOutput:
        """Encodes features.

        Args:
            feats: Features, masked or not.
            feat_lens: Number of valid frames of each utterance.
        """
        x, enc_lens = self.pre_encode(feats, feat_lens)
        return EncoderOutput(self.encode(x, enc_lens), enc_lens)

    def encode(
        self, x: Float[Tensor, "batch enc_frames dim"], enc_lens: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Applies all blocks to the output of `pre_encode`, masked or not."""
        return deque(self._outputs(x, enc_lens), maxlen=1).pop()

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

    def compile_blocks(self, num_shapes: int | None) -> None:
        """Compiles the blocks with torch at their first use; all blocks share the compiled code.

        Args:
            num_shapes: Number of batch shapes to compile for; None compiles for varying shapes.
        """
        if num_shapes is not None:
            # Each shape is compiled twice: with and without gradients.
            dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 2 * num_shapes + 2)
        for layer in self.layers:
            layer.compile(dynamic=None if num_shapes is None else False)

    def _outputs(
        self, x: Float[Tensor, "batch enc_frames dim"], enc_lens: Int[Tensor, " batch"]
    ) -> Iterator[Float[Tensor, "batch enc_frames dim"]]:
        num_frames, dim = x.shape[1:]
        x = self.dropout_pre_encoder(x * self.input_scale)
        yield x
        positions = self.dropout_emb(relative_positions(num_frames, dim, x.device).to(x.dtype))
        is_padding = torch.arange(num_frames, device=x.device) >= enc_lens.unsqueeze(1)
        for layer in self.layers:
            assert isinstance(layer, ConformerBlock)
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(
                    layer, x, positions, is_padding, use_reentrant=False, context_fn=_recompute_contexts(layer.conv)
                )
            else:
                x = layer(x, positions, is_padding)
            yield x


def _recompute_contexts(
    conv: ConvModule,
) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """Returns the contexts of the first forward pass and of its recomputation, which freezes statistics."""
    return lambda: (nullcontext(), conv.frozen_statistics())
