"""The convolution module of a conformer block."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nestmodel.config import EncoderConfig
from nestmodel.nn.attention import Frames
from nestmodel.nn.batch_norm import StepBatchNorm


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

    def forward(
        self, x: Float[Tensor, "batch enc_frames dim"], frames: Frames
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Convolves over time; padded frames are zero in the depthwise convolution.

        Args:
            x: Encoder frames.
            frames: Their padding.
        """
        x = F.glu(_pointwise(self.pointwise_conv1, x), dim=2)
        x = x.masked_fill(frames.is_padding.unsqueeze(2), 0.0)
        return self._finish(self._mix_frames(x, self.context))

    def extend(
        self, x: Float[Tensor, "batch new_frames dim"], cache: Float[Tensor, "batch cached_frames dim"]
    ) -> tuple[Float[Tensor, "batch new_frames dim"], Float[Tensor, "batch cached_frames dim"]]:
        """Convolves new frames with the frames before them, in eval mode; reads none to the right.

        Args:
            x: The new frames.
            cache: Cache of the frames before them; zeros at the start.

        Returns:
            The convolved new frames, and the cache for the next ones.
        """
        extended = torch.cat([cache, F.glu(_pointwise(self.pointwise_conv1, x), dim=2)], dim=1)
        kept = extended[:, extended.shape[1] - cache.shape[1] :].clone()
        return self._finish(self._mix_frames(extended, (0, 0))), kept

    def _mix_frames(
        self, x: Float[Tensor, "batch enc_frames dim"], padding: tuple[int, int]
    ) -> Float[Tensor, "batch convolved_frames dim"]:
        weight, bias, (pad, right) = self.depthwise_conv.weight, self.depthwise_conv.bias, padding
        groups = len(weight)
        if pad != right:
            x, pad = F.pad(x, (0, 0, pad, right)), 0
        # A 2-d convolution of one row with channels last, which is already the memory layout, takes a quarter of the
        # time on a CPU.
        image = x.transpose(1, 2).unsqueeze(2)  # (batch, dim, 1, enc_frames)
        # The gradient of its weight has other strides than the weight, in dimensions of one element. The view sets them
        # right; otherwise, DDP warns at every start.
        image = F.conv2d(image, weight.flatten(1).view(groups, 1, 1, -1), bias, padding=(0, pad), groups=groups)
        return image.squeeze(2).transpose(1, 2)

    def _finish(self, x: Float[Tensor, "batch enc_frames dim"]) -> Float[Tensor, "batch enc_frames dim"]:
        x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        return _pointwise(self.pointwise_conv2, F.silu(x))

    def frozen_statistics(self) -> AbstractContextManager[None]:
        """Leaves the batch norm statistics unchanged while a forward pass is recomputed."""
        return self.batch_norm.frozen_statistics() if isinstance(self.batch_norm, StepBatchNorm) else nullcontext()


def _pointwise(layer: nn.Conv1d, x: Float[Tensor, "batch enc_frames dim"]) -> Float[Tensor, "batch enc_frames out_dim"]:
    return F.linear(x, layer.weight.squeeze(2), layer.bias)
