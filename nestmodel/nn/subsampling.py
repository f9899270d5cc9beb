"""Convolutional subsampling of feature frames to encoder frames.

Owns the strided convolutions in front of the encoder. Guarantees that no value past an utterance's length reaches
its valid encoder frames.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MAX_VALUES = 2**28
"""Values of the largest tensor of a pass; more utterances than have so many go through one after the other."""

MAX_VALUES_ON_CPU = 2**23
"""The same on a CPU, whose allocator gives tensors below 32 MiB the memory of others."""


def halved(num: int) -> int:
    """Rows or columns that a convolution of stride 2, kernel 3 and padding 1 leaves: half of them, rounded up."""
    return (num + 1) // 2


class ConvSubsampling(nn.Module):
    """Depthwise-separable strided convolutions over time and mel bins, then a projection of each encoder frame.

    Each stage halves time and mel bins: one full 3x3 convolution first, then depthwise 3x3 with pointwise 1x1 ones,
    each with ReLU. Time past the valid length is zeroed between stages and at the end, so a padded encoder frame
    equals the bias of the projection, not zero.

    Source: FastConformer, arXiv:2305.05084, section 3; NeMo's "dw_striding". Differs: NeMo also zeroes the padding
    between a depthwise and its pointwise convolution, which no valid frame sees.
    """

    def __init__(self, *, num_mels: int, channels: int, factor: int, dim: int) -> None:
        super().__init__()
        self.factor = factor
        self.channels = channels
        layers: list[nn.Module] = [nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.ReLU()]
        bins = halved(num_mels)
        for _ in range(factor.bit_length() - 2):
            layers.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels))
            layers += [nn.Conv2d(channels, channels, 1), nn.ReLU()]
            bins = halved(bins)
        self.conv = nn.Sequential(*layers)
        self.out = nn.Linear(channels * bins, dim)

    def forward(
        self, feats: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch enc_frames dim"], Int[Tensor, " batch"]]:
        """Shortens the frames and projects them to the encoder's size.

        Args:
            feats: Features; frames past the valid ones may hold anything finite.
            feat_lens: Valid frames of each utterance.

        Returns:
            The encoder frames, and how many of each utterance are valid: its frames / factor, rounded up.
        """
        # The convolutions make the largest tensors of the model by far, and cost little: some utterances at a time, and
        # once more for the backward pass instead of being kept.
        values = MAX_VALUES if feats.is_cuda else MAX_VALUES_ON_CPU
        size = max(1, values // max(1, self.channels * feats.shape[1] * feats.shape[2] // 4))
        chunks = [
            checkpoint(self._convolve, *chunk, use_reentrant=False, preserve_rng_state=False)
            if torch.is_grad_enabled()
            else self._convolve(*chunk)
            for chunk in zip(feats.split(size), feat_lens.split(size), strict=True)
        ]
        encoded: Tensor = self.out(torch.cat(chunks))
        return encoded, self.out_lens(feat_lens)

    def _convolve(
        self, feats: Float[Tensor, "batch mels frames"], lens: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch enc_frames values"]:
        # (batch, mels, frames) -> (batch, channels, frames, mels). On a CPU, channels-last convolutions take half
        # the time of others.
        x = feats.transpose(1, 2).unsqueeze(1)
        if not x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        x = x * _is_valid(x, lens)
        for layer in self.conv:
            if isinstance(layer, nn.ReLU):
                # Both in place: the convolutions need no output for their gradient.
                lens = (lens + 1) // 2
                is_valid = _is_valid(x, lens)
                if torch.is_grad_enabled():
                    x = _MaskedRelu.apply(x, is_valid)  # type: ignore[no-untyped-call]  # torch has no annotations for it
                else:
                    x = x.mul_(is_valid).relu_()
            else:
                x = layer(x)
        return x.transpose(1, 2).flatten(2)

    def out_lens(self, feat_lens: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Returns how many encoder frames are valid where so many frames are: frames / factor, rounded up."""
        return (feat_lens + self.factor - 1) // self.factor


class _MaskedRelu(torch.autograd.Function):
    """The ReLU of what a mask leaves, in place of its input. Where a value is left, so is its gradient: masked once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(mask).relu_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grads[0], output, 0), None


def _is_valid(x: Float[Tensor, "batch channels frames mels"], lens: Int[Tensor, " batch"]) -> Tensor:
    """Ones on valid frames and zeros elsewhere, to multiply `x` by."""
    positions = torch.arange(x.shape[2], device=x.device)
    return (positions < lens.unsqueeze(1))[:, None, :, None].to(x.dtype)
