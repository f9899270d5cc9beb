"""Convolutional subsampling of feature frames to encoder frames.

This module holds the strided convolutions in front of the encoder. No value past an utterance's length affects its
valid encoder frames.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MAX_VALUES = 2**23
"""Maximum number of values of the largest intermediate tensor. Larger batches are processed in several chunks. The
allocator of a CPU reuses freed memory for tensors below 32 MiB."""

Size = TypeVar("Size", int, Tensor)

SubsamplingCache = tuple[Float[Tensor, "batch _ _ _"], ...]
"""The last frames of each stage's input, which later frames read as well; shape (batch, channels, frames, mels)."""


def halve(size: Size, *, is_causal: bool = False) -> Size:
    """Returns the output sizes of a convolution of stride 2 and kernel 3.

    Args:
        size: Input sizes.
        is_causal: Whether the input is padded with 2 zeros in front and 1 at the end, which gives half the size rounded
            down, plus 1. Otherwise it is padded with 1 on both sides, which gives half the size, rounded up.
    """
    return size // 2 + 1 if is_causal else (size + 1) // 2


def num_subsampled(size: Size, factor: int, *, is_causal: bool = False) -> Size:
    """Returns the output sizes of log2(factor) convolutions of `halve`.

    This is size / factor, rounded up. If the convolutions are causal, it is (size + factor - 2) / factor, rounded down,
    plus 1: 800 frames give 101 at a factor of 8.
    """
    return (size + factor - 2) // factor + 1 if is_causal else (size + factor - 1) // factor


class ConvSubsampling(nn.Module):
    """Depthwise-separable strided convolutions over time and mel bins, then a projection of each encoder frame.

    Each stage halves time and mel bins. The first stage is a full 3x3 convolution, the others are a depthwise 3x3 and a
    pointwise 1x1 convolution; each ends with a ReLU. Time past the valid length is zeroed between stages and at the
    end, so a padded encoder frame equals the bias of the projection, not zero.

    With `is_causal`, a stage reads two frames before its own and none after it, so an encoder frame reads no feature
    frame after its first. The mel bins are padded in the same way, as in NeMo's `causal_downsampling`.

    Source: FastConformer, arXiv:2305.05084, section 3; NeMo's "dw_striding". Differs: NeMo also zeroes the padding
    between a depthwise and its pointwise convolution, which does not affect valid frames.
    """

    def __init__(self, *, num_mels: int, channels: int, factor: int, dim: int, is_causal: bool = False) -> None:
        super().__init__()
        self.factor = factor
        self.channels = channels
        self.is_causal = is_causal
        padding = 0 if is_causal else 1  # `pad_if_causal` pads for causal convolutions
        layers: list[nn.Module] = [nn.Conv2d(1, channels, 3, stride=2, padding=padding), nn.ReLU()]
        for _ in range(factor.bit_length() - 2):
            layers.append(nn.Conv2d(channels, channels, 3, stride=2, padding=padding, groups=channels))
            layers += [nn.Conv2d(channels, channels, 1), nn.ReLU()]
        self.conv = nn.Sequential(*layers)
        self.out = nn.Linear(channels * num_subsampled(num_mels, factor, is_causal=is_causal), dim)

    def forward(
        self, feats: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch enc_frames dim"], Int[Tensor, " batch"]]:
        """Subsamples features and projects them to the dimension of the encoder.

        Args:
            feats: Features; frames past the valid ones may hold any finite values.
            feat_lens: Number of valid frames of each utterance.

        Returns:
            The encoder frames, and the number of valid ones of each utterance, by `num_subsampled`.
        """
        # The convolutions produce by far the largest tensors of the model and are cheap. So they process some
        # utterances at a time, and are recomputed in the backward pass instead of keeping their outputs.
        size, recomputes = self.num_at_once(feats), torch.is_grad_enabled() and self.recomputes(feats)
        chunks = [
            checkpoint(self.convolve, *chunk, use_reentrant=False, preserve_rng_state=False)
            if recomputes
            else self.convolve(*chunk)
            for chunk in zip(feats.split(size), feat_lens.split(size), strict=True)
        ]
        encoded: Tensor = self.out(torch.cat(chunks))
        return encoded, self.out_lens(feat_lens)

    def convolve(
        self, feats: Float[Tensor, "batch mels frames"], lens: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch enc_frames values"]:
        """Applies the convolutions to a whole batch at once, without the projection."""
        # (batch, mels, frames) -> (batch, channels, frames, mels). Channels-last convolutions take half the time.
        x = feats.transpose(1, 2).unsqueeze(1).contiguous(memory_format=torch.channels_last)
        x = x * is_valid_frame(x, lens).to(x.dtype)
        return self.apply_layers(self.conv, x, lens, _convolve, lambda x, is_valid: x.mul_(is_valid).relu_())

    def apply_layers(
        self,
        layers: Iterable[nn.Module],
        x: Float[Tensor, "batch channels frames mels"],
        lens: Int[Tensor, " batch"],
        convolve: Callable[[nn.Conv2d, Tensor], Tensor],
        masked_relu_: Callable[[Tensor, Tensor], Tensor],
    ) -> Float[Tensor, "batch enc_frames values"]:
        """Applies convolutions, and zeroes padded frames with each ReLU.

        Args:
            layers: The last layers of `conv`, or all of them.
            x: Input of the first layer.
            lens: Number of valid frames of each utterance.
            convolve: Applies a convolution; the input of a causal one is already padded.
            masked_relu_: Zeroes an output where its second argument is False, and applies a ReLU, in place.
        """
        for layer in layers:
            if isinstance(layer, nn.ReLU):
                lens = halve(lens, is_causal=self.is_causal)
                apply_: Callable[[Tensor, Tensor], Tensor] = masked_relu_
                if torch.is_grad_enabled():
                    apply_ = partial(_MaskedRelu.apply, masked_relu_)
                x = apply_(x, is_valid_frame(x, lens))
            else:
                assert isinstance(layer, nn.Conv2d)
                x = convolve(layer, _pad_if_causal(layer, x))
        return x.transpose(1, 2).flatten(2)

    def num_at_once(self, feats: Float[Tensor, "batch mels frames"]) -> int:
        """Returns the number of utterances that are processed at once, so that no tensor has too many values."""
        return max(1, MAX_VALUES // max(1, self.channels * feats.shape[1] * feats.shape[2] // 4))

    def recomputes(self, feats: Float[Tensor, "batch mels frames"]) -> bool:  # noqa: ARG002 - for that of GPUs
        """Returns whether the backward pass recomputes the convolutions; it gets the same bits either way."""
        return True

    def extend(
        self,
        feats: Float[Tensor, "batch mels frames"],
        cache: SubsamplingCache | None,
        *,
        is_last: bool = False,
        feat_lens: Int[Tensor, " batch"] | None = None,
    ) -> tuple[Float[Tensor, "batch enc_frames dim"], SubsamplingCache]:
        """Returns the encoder frames that the next features of a stream complete; without gradients.

        Args:
            feats: The next feature frames.
            cache: Cache of the frames before them; None for the first ones.
            is_last: Whether no frames follow, so that the zeros past the last one complete further encoder frames.
            feat_lens: Number of frames from here to the end of each stream, possibly negative; later ones are zeroed
                between the stages. This needs causal convolutions, and a multiple of `factor` frames. By default, all
                frames are valid.

        Returns:
            The encoder frames, and the cache for the next feature frames.
        """
        in_front = self.num_in_front
        kept: list[Tensor] = []
        x = feats.transpose(1, 2).unsqueeze(1)  # (batch, channels, frames, mels)
        if feat_lens is not None:
            x = x * is_valid_frame(x, feat_lens)
        for layer in self.conv:
            if isinstance(layer, nn.ReLU):
                x = x.relu_()
                if feat_lens is not None:
                    feat_lens = halve(feat_lens, is_causal=True)
                    x = x * is_valid_frame(x, feat_lens)
                continue
            assert isinstance(layer, nn.Conv2d)
            if layer.stride == (2, 2):
                earlier = x.new_zeros(*x.shape[:2], in_front, x.shape[3]) if cache is None else cache[len(kept)]
                x = F.pad(torch.cat([earlier, x], dim=2), (in_front, 1, 0, 1 if is_last else 0))
                num_frames = (x.shape[2] - 1) // 2
                kept.append(x[:, :, 2 * num_frames :, in_front:-1].clone())
            else:
                num_frames = x.shape[2]
            if num_frames > 0:
                x = F.conv2d(x, layer.weight, layer.bias, layer.stride, groups=layer.groups)
            else:
                num_mels = (x.shape[3] - layer.kernel_size[1]) // layer.stride[1] + 1
                x = x.new_zeros(len(x), layer.out_channels, 0, num_mels)
        return self.out(x.transpose(1, 2).flatten(2)), tuple(kept)

    @property
    def num_in_front(self) -> int:
        """Number of zeros in front of frames and of bins."""
        return 2 if self.is_causal else 1

    def out_lens(self, feat_lens: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Returns the numbers of valid encoder frames for numbers of valid frames, by `num_subsampled`."""
        return num_subsampled(feat_lens, self.factor, is_causal=self.is_causal)

    def token_lens(self, feat_lens: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Returns the numbers of valid tokens and other labels of encoder frames: frames / factor, rounded up."""
        return num_subsampled(feat_lens, self.factor)


class _MaskedRelu(torch.autograd.Function):
    """Zeroes padded frames and applies a ReLU in place; convolutions do not need their outputs for gradients.

    The gradient is passed where the output is positive, so the mask need not be kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, masked_relu_: Callable[[Tensor, Tensor], Tensor], x: Tensor, is_valid: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        masked_relu_(x, is_valid)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (output,) = ctx.saved_tensors
        return None, torch.ops.aten.threshold_backward(grads[0], output, 0), None


def _convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Applies a convolution whose weight gets a gradient with its own strides, as in `ConvModule`."""
    weight = layer.weight
    if torch.is_grad_enabled():
        weight = weight.flatten(1).view_as(weight)
    return F.conv2d(x, weight, layer.bias, layer.stride, layer.padding, groups=layer.groups)


def _pad_if_causal(layer: nn.Conv2d, x: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch _ _ _"]:
    """Pads frames and mel bins of a causal convolution's input with zeros, in front and behind."""
    return F.pad(x, (2, 1, 2, 1)) if layer.stride == (2, 2) and layer.padding == (0, 0) else x


def is_valid_frame(x: Float[Tensor, "batch channels frames mels"], lens: Int[Tensor, " batch"]) -> Tensor:
    """Returns True on valid frames, in a shape to multiply `x` by."""
    positions = torch.arange(x.shape[2], device=x.device)
    return (positions < lens.unsqueeze(1))[:, None, :, None]
