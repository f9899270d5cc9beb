"""The subsampling on a GPU: its first two stages are one operation, and masked ReLUs are one kernel."""

import math
from functools import cache, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from nestmodel.nn.backend import KERNELS
from nestmodel.nn.gpu import devices
from nestmodel.nn.gpu.first_stages import first_stages
from nestmodel.nn.precision import product_dtype
from nestmodel.nn.subsampling import ConvSubsampling, halve, is_valid_frame

MAX_VALUES_ON_GPU = 2**27
"""Maximum number of values of the largest intermediate tensor, as `MAX_VALUES` is for `ConvSubsampling`."""


class AcceleratedConvSubsampling(ConvSubsampling):
    """`ConvSubsampling` with operations of its own if its input is on a GPU."""

    backend = KERNELS
    """Whether the first two stages are one operation on a GPU, where its kernels work, and whether the activations
    that follow them are kept for the backward pass."""

    def recomputes(self, feats: Float[Tensor, "batch mels frames"]) -> bool:
        """Returns whether the backward pass recomputes the convolutions; see `ConvSubsampling.recomputes`."""
        return not (self.backend.keeps_subsampling and devices.is_on_gpu(feats) and self._joins_stages(feats))

    def num_at_once(self, feats: Float[Tensor, "batch mels frames"]) -> int:
        """Returns the number of utterances that are processed at once; see `ConvSubsampling.num_at_once`."""
        if not devices.is_on_gpu(feats):
            return super().num_at_once(feats)
        factor = 4 if self._joins_stages(feats) else 2  # subsampling factor of the first stage whose values are stored
        return max(1, MAX_VALUES_ON_GPU // max(1, self.channels * feats.shape[1] * feats.shape[2] // factor**2))

    def convolve(
        self, feats: Float[Tensor, "batch mels frames"], lens: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch enc_frames values"]:
        """Applies the convolutions; see `ConvSubsampling.convolve`."""
        if not devices.is_on_gpu(feats):
            return super().convolve(feats, lens)
        if self._joins_stages(feats):
            return self.convolve_joined(feats, lens)
        x = feats.transpose(1, 2).unsqueeze(1)  # (batch, mels, frames) -> (batch, channels, frames, mels)
        x = x * is_valid_frame(x, lens).to(x.dtype)
        return self.apply_layers(self.conv, x, lens, nn.Conv2d.__call__, _clamp_)

    def convolve_joined(
        self, feats: Float[Tensor, "batch mels frames"], lens: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch enc_frames values"]:
        """Applies the convolutions, the first two stages as one operation."""
        full, depthwise = self.conv[0], self.conv[2]
        assert isinstance(full, nn.Conv2d)
        assert isinstance(depthwise, nn.Conv2d)
        x = first_stages(feats, lens, full, depthwise, self.num_in_front).permute(0, 3, 1, 2)
        if torch.are_deterministic_algorithms_enabled():
            x = x.contiguous()  # for depthwise convolutions of torch, which are deterministic, instead of cuDNN
        lens = halve(lens, is_causal=self.is_causal)
        return self.apply_layers(list(self.conv)[3:], x, lens, nn.Conv2d.__call__, _clamp_)

    def _joins_stages(self, feats: Float[Tensor, "batch mels frames"]) -> bool:
        """Returns whether the first two stages are one operation, which gives features no gradient."""
        if not self.backend.kernels or self.factor == 2 or feats.requires_grad:
            return False
        if feats.dtype != torch.float32 or self.conv[0].weight.dtype != torch.float32:
            return False
        # Kernels cannot be checked with tensors without values, with which benchmarks count operations.
        return isinstance(feats, FakeTensor) or _has_kernels(feats.device, product_dtype(feats), self.is_causal)


@cache
def _has_kernels(device: torch.device, dtype: torch.dtype, is_causal: bool) -> bool:
    """Returns whether the kernels of the first two stages work on a GPU; warns if they do not."""
    if not torch.cuda.is_available():
        return True  # for tests, which run the code for GPUs on a CPU
    consequence = "The first two stages of the subsampling are slower"
    return devices.has_kernel(lambda: devices.is_right(partial(run_subsampling, is_causal), device, dtype), consequence)


def run_subsampling(is_causal: bool, device: torch.device, dtype: torch.dtype, with_kernels: bool) -> list[Tensor]:
    """Returns valid outputs and gradients of a small subsampling; see `devices.is_right`."""
    generator = torch.Generator().manual_seed(0)
    # More channels than a program computes, and a number of frames and bins that does not fill the last program.
    with torch.random.fork_rng(devices=[]):
        module = AcceleratedConvSubsampling(num_mels=10, channels=144, factor=4, dim=8, is_causal=is_causal)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    feats = torch.randn(3, 10, 70, generator=generator, device="cpu").to(device, wide)
    lens = torch.tensor([70, 1, 33], device=device)
    module.to(device, wide)
    with torch.autocast(device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        out = module.convolve_joined(feats, lens) if with_kernels else ConvSubsampling.convolve(module, feats, lens)
    (out * torch.randn(out.shape, generator=generator, device="cpu").to(out)).sum().backward()
    found = [out, *(parameter.grad for parameter in module.conv.parameters())]
    return [each.detach().cpu().double() for each in found if each is not None]


def _clamp_(x: Tensor, is_valid: Tensor) -> Tensor:
    # The largest tensors of a step are read and written once, not twice. A CPU takes longer for this.
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return x.clamp_(zero, torch.where(is_valid, math.inf, zero))
