"""The subsampling on a GPU: its first two stages are one operation, and masked ReLUs are one kernel."""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from nestmodel.nn.gpu import devices
from nestmodel.nn.gpu.first_stages import Convolutions, first_stages, has_kernels
from nestmodel.nn.precision import product_dtype
from nestmodel.nn.subsampling import ConvSubsampling, halve, is_valid_frame

MAX_VALUES_ON_GPU = 2**27
"""Maximum number of values of the largest intermediate tensor, as `MAX_VALUES` is for `ConvSubsampling`."""


class AcceleratedConvSubsampling(ConvSubsampling):
    """`ConvSubsampling` with operations of its own if its input is on a GPU."""

    has_joined_stages = True
    """Whether the first two stages are one operation on a GPU, where its kernels work."""

    keeps_activations = False
    """Whether joined stages keep the activations that follow them for the backward pass."""

    def recomputes(self, feats: Float[Tensor, "batch mels frames"]) -> bool:
        """Returns whether the backward pass recomputes the convolutions; see `ConvSubsampling.recomputes`."""
        return not (self.keeps_activations and devices.is_on_gpu(feats) and self._joins_stages(feats))

    def num_at_once(self, feats: Float[Tensor, "batch mels frames"]) -> int:
        """Returns the number of utterances that are processed at once; see `ConvSubsampling.num_at_once`."""
        if not devices.is_on_gpu(feats):
            return super().num_at_once(feats)
        factor = 4 if self._joins_stages(feats) else 2  # of the first stage whose values are stored
        return max(1, MAX_VALUES_ON_GPU // max(1, self.channels * feats.shape[1] * feats.shape[2] // factor**2))

    def convolve(
        self, feats: Float[Tensor, "batch mels frames"], lens: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch enc_frames values"]:
        """Applies the convolutions; see `ConvSubsampling.convolve`."""
        if not devices.is_on_gpu(feats):
            return super().convolve(feats, lens)
        layers: Iterable[nn.Module] = self.conv
        if self._joins_stages(feats):
            convolutions = Convolutions(*self.conv[0].parameters(), *self.conv[2].parameters())
            x = first_stages(feats, lens, convolutions, self.num_in_front)
            x, lens, layers = x.permute(0, 3, 1, 2), halve(lens, is_causal=self.is_causal), list(self.conv)[3:]
            if torch.are_deterministic_algorithms_enabled():
                x = x.contiguous()  # for depthwise convolutions of torch, which are deterministic, instead of cuDNN
        else:
            x = feats.transpose(1, 2).unsqueeze(1)  # (batch, mels, frames) -> (batch, channels, frames, mels)
            x = x * is_valid_frame(x, lens).to(x.dtype)
        return self.apply_layers(layers, x, lens, nn.Conv2d.__call__, _clamp_)

    def _joins_stages(self, feats: Float[Tensor, "batch mels frames"]) -> bool:
        """Returns whether the first two stages are one operation, which gives features no gradient."""
        if not self.has_joined_stages or self.factor == 2 or feats.requires_grad:
            return False
        if feats.dtype != torch.float32 or self.conv[0].weight.dtype != torch.float32:
            return False
        # Kernels cannot be checked with tensors without values, with which benchmarks count operations.
        return isinstance(feats, FakeTensor) or has_kernels(feats.device, product_dtype(feats), self.num_in_front)


def _clamp_(x: Tensor, is_valid: Tensor) -> Tensor:
    # The largest tensors of a step are read and written once, not twice. A CPU takes longer for this.
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return x.clamp_(zero, torch.where(is_valid, math.inf, zero))
