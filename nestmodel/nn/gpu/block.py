"""A block of the encoder on a GPU: weights that are converted together, kernels in Triton, and compiled code.

It reads the parameters of `ConformerBlock`, which defines what a block computes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nestmodel.nn.attention import Frames
from nestmodel.nn.backend import KERNELS
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.block import KEYS_PER_BLOCK, BlockKeys, ConformerBlock, FeedForward, split_keys
from nestmodel.nn.compiler import compiled_if_set
from nestmodel.nn.convolution import ConvModule
from nestmodel.nn.dropout import Key
from nestmodel.nn.gpu.cast_weights import FusedParameters, Weights, cast_weights, fused_parameters
from nestmodel.nn.gpu.dropout import drop_on_gpu
from nestmodel.nn.gpu.gated_convolution import gated_convolution, join_moments
from nestmodel.nn.gpu.relative_attention import GpuFrames, attend, attention_parameters
from nestmodel.nn.precision import product_dtype


class AcceleratedConformerBlock(ConformerBlock):
    """`ConformerBlock` that calls `transform` if its frames are described for a GPU; both can be compiled.

    `transform` calls the layer norms and the batch norm as modules, but only reads the parameters of the other modules,
    so hooks on the latter do not run on a GPU.
    """

    backend = KERNELS
    """Whether the block is compiled at its first use, but not the conversion of its weights: the compiler would convert
    each weight and each of its gradients by a kernel of its own."""

    def forward(
        self,
        x: Float[Tensor, "batch enc_frames dim"],
        frames: Frames | GpuFrames,
        keys: BlockKeys | None = None,
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Applies the block; see `ConformerBlock.forward`."""
        if isinstance(frames, Frames):
            out: Tensor = compiled_if_set(ConformerBlock.forward, self.backend)(self, x, frames, keys)
            return out
        if self.backend.compiles_varying_shapes:
            _mark_varying_sizes(x, frames)
        out = compiled_if_set(transform, self.backend)(self, x, frames, self.weights(x), keys)
        return out

    def weights(self, x: Float[Tensor, "batch enc_frames dim"]) -> Sequence[Weights]:
        """Returns the weights of the four modules in the type of matrix products."""
        conv = self.conv
        parameters = [
            _feed_forward_parameters(self.feed_forward1),
            attention_parameters(self.self_attn),
            [fused_parameters(layer) for layer in (conv.pointwise_conv1, conv.depthwise_conv, conv.pointwise_conv2)],
            _feed_forward_parameters(self.feed_forward2),
        ]
        return cast_weights(parameters, product_dtype(x))


def _mark_varying_sizes(x: Tensor, frames: GpuFrames) -> None:
    """Tells the compiler which sizes differ from batch to batch, so that its first code accepts any size."""
    dynamo.maybe_mark_dynamic(x, [0, 1])
    dynamo.maybe_mark_dynamic(frames.lens, 0)
    dynamo.maybe_mark_dynamic(frames.positions, 0)


def transform(
    block: ConformerBlock,
    x: Float[Tensor, "batch enc_frames dim"],
    frames: GpuFrames,
    weights: Sequence[Weights],
    keys: BlockKeys | None,
) -> Float[Tensor, "batch enc_frames dim"]:
    """Applies `block` with weights that were converted before, by `AcceleratedConformerBlock.weights`."""
    of_feed_forward1, of_attention, of_conv, of_feed_forward2 = weights
    within1, after1, within_att, after_att, after_conv, within2, after2 = split_keys(keys, KEYS_PER_BLOCK)
    half = _feed_forward(block.feed_forward1, block.norm_feed_forward1(x), of_feed_forward1, within1)
    x = torch.add(x, drop_on_gpu(block.dropout, half, after1), alpha=0.5)
    attended = attend(block.self_attn, block.norm_self_att(x), frames, of_attention, within_att)
    x = x + drop_on_gpu(block.dropout, attended, after_att)
    x = x + drop_on_gpu(block.dropout, _convolve(block.conv, block.norm_conv(x), frames, of_conv), after_conv)
    half = _feed_forward(block.feed_forward2, block.norm_feed_forward2(x), of_feed_forward2, within2)
    x = torch.add(x, drop_on_gpu(block.dropout, half, after2), alpha=0.5)
    out: Tensor = block.norm_out(x)
    return out


def _feed_forward_parameters(module: FeedForward) -> list[FusedParameters]:
    return [fused_parameters(module.linear1), fused_parameters(module.linear2)]


def _feed_forward(
    module: FeedForward, x: Float[Tensor, "batch enc_frames dim"], weights: Weights, key: Key | None
) -> Float[Tensor, "batch enc_frames dim"]:
    (weight1, bias1), (weight2, bias2) = weights
    return F.linear(drop_on_gpu(module.dropout, F.silu(F.linear(x, weight1, bias1)), key), weight2, bias2)


def _convolve(
    module: ConvModule, x: Float[Tensor, "batch enc_frames dim"], frames: GpuFrames, weights: Weights
) -> Float[Tensor, "batch enc_frames dim"]:
    (weight1, bias1), (weight, bias), (weight2, bias2) = weights
    gates = F.linear(x.to(weight1.dtype), weight1.squeeze(2))
    mixed, parts = gated_convolution(gates, frames.lens, bias1, weight.squeeze(1), bias, module.context[0])
    return F.linear(F.silu(_normalise(module.batch_norm, mixed, parts)), weight2.squeeze(2), bias2)


def _normalise(
    norm: nn.Module, mixed: Float[Tensor, "batch enc_frames dim"], parts: Float[Tensor, "batch parts 2 dim"]
) -> Float[Tensor, "batch enc_frames dim"]:
    """Applies the norm of a convolution; in a training step, batch norm uses the moments in `parts`."""
    if not isinstance(norm, StepBatchNorm) or not norm.is_collecting:
        out: Tensor = norm(mixed.flatten(0, 1)).view_as(mixed)
        return out
    num_values = mixed.shape[0] * mixed.shape[1]
    mean, var = join_moments(parts, mixed.shape[1])
    norm.collect(torch.stack([mean, var * num_values / max(1, num_values - 1)]))
    inputs = mixed, norm.weight, norm.bias, mean, (var + norm.eps).rsqrt()
    normalised: Tensor = _BatchNorm.apply(*inputs)  # type: ignore[no-untyped-call]  # of torch
    return normalised.to(mixed.dtype)  # outside the function: a cast to the same type there makes gradients vanish


class _BatchNorm(torch.autograd.Function):
    """Normalises by given moments of the input; the gradient includes their share, as in batch norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean, scale, weight)
        return (x - mean) * (scale * weight) + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, weight = ctx.saved_tensors
        grad, normalised = grads[0], (x - mean) * scale
        of_bias, of_weight = grad.sum((0, 1)), (grad * normalised).sum((0, 1))
        num_values = x.shape[0] * x.shape[1]
        rest = grad - (of_bias + normalised * of_weight) / num_values
        return (rest * (scale * weight)).to(x.dtype), of_weight, of_bias, None, None
