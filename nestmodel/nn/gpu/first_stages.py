"""The first two stages of the subsampling as one operation of a GPU, without their largest tensor.

The output of the first stage has a value for each channel and for each second frame and bin, more than any other tensor
of a step, and only the second stage reads it. Here, neither pass stores it. Features get no gradient.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from nestmodel.nn.precision import product_dtype


def first_stages(
    feats: Float[Tensor, "batch mels frames"],
    lens: Int[Tensor, " batch"],
    full: nn.Conv2d,
    depthwise: nn.Conv2d,
    padding: int = 1,
) -> Float[Tensor, "batch frames4 mels4 channels"]:
    """Convolves features, applies a ReLU, and convolves each channel. Padded frames are zero before each convolution.

    Args:
        feats: Features, float32 and without a gradient; frames past the valid ones may hold any finite values.
        lens: Number of valid frames of each utterance, at most `frames`.
        full: 3x3 convolution of the features with stride 2; float32.
        depthwise: 3x3 convolution of its channels with stride 2; float32.
        padding: Zeros in front of frames and bins in both stages, 1 or 2; one follows them. With 2, the convolutions
            are causal.

    Returns:
        The values in the type of matrix products. Each stage has (size + padding) // 2 frames and bins.
    """
    weights = *full.parameters(), *depthwise.parameters()
    found: Tensor = _first_stages(product_dtype(feats), feats, lens, *weights, padding)
    return found


@torch.library.custom_op("nestmodel::first_stages", mutates_args=())
def _first_stages(
    dtype: torch.dtype,
    feats: Tensor,
    lens: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    padding: int,
) -> Tensor:
    from nestmodel.nn.gpu.first_stages_kernel import launch_first_stages

    out = torch.empty(_out_shape(feats, weight1, padding), dtype=dtype, device=feats.device)
    launch_first_stages((feats, lens.contiguous(), weight1.flatten(1), bias1, weight2.flatten(1)), bias2, out, padding)
    return out


@torch.library.custom_op("nestmodel::first_stages_gradients", mutates_args=())
def _gradients(
    feats: Tensor, lens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, grad: Tensor, padding: int
) -> Tensor:
    from nestmodel.nn.gpu.first_stages_kernel import launch_gradients

    return launch_gradients(
        (feats, lens.contiguous(), weight1.flatten(1), bias1, weight2.flatten(1)), grad.contiguous(), padding
    )


def _out_shape(feats: Tensor, weight: Tensor, padding: int) -> tuple[int, int, int, int]:
    batch, mels, frames = feats.shape
    return batch, *_out_sizes(mels, frames, padding), len(weight)


def _out_sizes(mels: int, frames: int, padding: int) -> tuple[int, int]:
    """Returns the numbers of frames and bins after both stages."""
    return _halve(_halve(frames, padding), padding), _halve(_halve(mels, padding), padding)


def _halve(size: Any, padding: int) -> Any:
    return (size + padding) // 2


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's names
    _, feats, lens, weight1, bias1, weight2, _, ctx.padding = inputs
    ctx.save_for_backward(feats, lens, weight1, bias1, weight2)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    feats, lens, weight1, bias1, weight2 = ctx.saved_tensors
    found = _gradients(feats, lens, weight1, bias1, weight2, grad, ctx.padding)
    of_first, of_second = (found[start : start + 9].T.reshape(weight1.shape) for start in (0, 16))
    return None, None, None, of_first, found[9].clone(), of_second, found[25].clone(), None


_first_stages.register_fake(
    lambda dtype, feats, lens, weight1, bias1, weight2, bias2, padding: torch.empty(  # noqa: ARG005 - by name
        _out_shape(feats, weight1, padding), dtype=dtype, device=feats.device
    )
)
_first_stages.register_autograd(_backward, setup_context=_keep_inputs)
_gradients.register_fake(lambda feats, lens, weight1, *_: weight1.new_empty(32, len(weight1)))  # noqa: ARG005


@register_flop_formula(torch.ops.nestmodel.first_stages)
def _count_flops(dtype: Any, feats: torch.Size, lens: torch.Size, weight1: torch.Size, *rest: Any, **_: Any) -> int:  # noqa: ARG001
    """Returns the operations of the two convolutions; the kernel computes the first one 2.25 times."""
    return sum(_flops_of_each(feats, weight1, rest[-1]))


@register_flop_formula(torch.ops.nestmodel.first_stages_gradients)
def _count_flops_of_gradients(feats: torch.Size, lens: torch.Size, weight1: torch.Size, *rest: Any, **_: Any) -> int:  # noqa: ARG001
    first, second = _flops_of_each(feats, weight1, rest[-1])
    return first + 2 * second


def _flops_of_each(feats: torch.Size, weight1: torch.Size, padding: int) -> tuple[int, int]:
    batch, mels, frames = feats
    frames4, mels4 = _out_sizes(mels, frames, padding)
    values = batch * weight1[0] * _halve(mels, padding) * _halve(frames, padding)
    return 2 * 9 * values, 2 * 9 * batch * weight1[0] * mels4 * frames4
