"""The first two stages of the subsampling as one operation of a GPU, without their largest tensor.

The first stage has a value for each channel and for each second frame and bin: more than any other tensor of a step.
The second stage reads it once. Here, neither pass stores it. Features get no gradient.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from nestmodel.nn.gpu import devices
from nestmodel.nn.precision import product_dtype


class Convolutions(NamedTuple):
    """Weights of a full 3x3 convolution of the features and of a depthwise 3x3 one, both with stride 2; float32."""

    weight1: Float[Tensor, "channels 1 3 3"]
    bias1: Float[Tensor, " channels"]
    weight2: Float[Tensor, "channels 1 3 3"]
    bias2: Float[Tensor, " channels"]


def first_stages(
    feats: Float[Tensor, "batch mels frames"], lens: Int[Tensor, " batch"], convolutions: Convolutions, padding: int = 1
) -> Float[Tensor, "batch frames4 mels4 channels"]:
    """Convolves features, applies a ReLU, and convolves each channel. Padded frames are zero before each convolution.

    Args:
        feats: Features, float32 and without a gradient; frames past the valid ones may hold any finite values.
        lens: Number of valid frames of each utterance, at most `frames`.
        convolutions: Weights and biases.
        padding: Zeros in front of frames and bins in both stages, 1 or 2; one follows them. With 2, the convolutions
            are causal.

    Returns:
        The values in the type of matrix products. Each stage has (size + padding) // 2 frames and bins.
    """
    found: Tensor = _first_stages(product_dtype(feats), feats, lens, *convolutions, padding)
    return found


@cache
def has_kernels(device: torch.device, dtype: torch.dtype, padding: int) -> bool:
    """Returns whether the kernels compile on a GPU and agree with the definition there; warns if they do not.

    Args:
        device: The GPU.
        dtype: Type of matrix products.
        padding: As for `first_stages`.
    """
    if not torch.cuda.is_available():
        return True  # for tests, which run the code for GPUs on a CPU
    return devices.has_kernel(
        lambda: _check_kernels(device, dtype, padding), "The first two stages of the subsampling are slower"
    )


def _check_kernels(device: torch.device, dtype: torch.dtype, padding: int) -> bool:
    # Triton compiles other code for sizes that are multiples of 16. There are several blocks of channels and positions.
    return all(_agrees(device, dtype, padding, *sizes) for sizes in ((3, 10, 37, 70), (2, 16, 48, 144)))


def _agrees(
    device: torch.device, dtype: torch.dtype, padding: int, batch: int, mels: int, frames: int, channels: int
) -> bool:
    from nestmodel.nn.gpu.first_stages_kernel import launch_first_stages, launch_gradients

    generator = torch.Generator().manual_seed(0)
    weight, bias, out = (channels, 1, 3, 3), (channels,), (batch, *_out_sizes(mels, frames, padding), channels)
    # Small integers: products and sums are exact in every precision, and in any order.
    feats, weight1, bias1, weight2, bias2, grad = (
        torch.randint(-3, 4, size, generator=generator, device="cpu").float()
        for size in ((batch, mels, frames), weight, bias, weight, bias, out)
    )
    lens = torch.tensor([frames, 0, frames // 2], device="cpu")[:batch]
    expected = define_first_stages(torch.float32, feats, lens, weight1, bias1, weight2, bias2, padding)
    expected_grads = define_gradients(feats, lens, weight1, bias1, weight2, grad, padding)
    moved = tuple(each.to(device) for each in (feats, lens, weight1.flatten(1), bias1, weight2.flatten(1)))
    values = torch.empty(out, dtype=dtype, device=device)
    launch_first_stages(moved, bias2.to(device), values, padding)
    grads = launch_gradients(moved, grad.to(device, dtype), padding, num_programs=2)
    return torch.equal(values.cpu(), expected.to(dtype)) and torch.equal(grads.cpu(), expected_grads)


def define_first_stages(
    dtype: torch.dtype,
    feats: Tensor,
    lens: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    padding: int,
) -> Tensor:
    """Computes both stages by operations of torch: the definition, of which the kernel is a faster form."""
    x, is_valid = _as_image(feats, lens, dtype, padding)
    x = _pad(_apply_first(x, is_valid, weight1.to(dtype), bias1.to(dtype)), padding)
    x = F.conv2d(x, weight2.to(dtype), bias2.to(dtype), 2, 1, groups=len(weight2))
    return x.permute(0, 2, 3, 1).contiguous()


def define_gradients(
    feats: Tensor, lens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, grad: Tensor, padding: int
) -> Tensor:
    """Computes the gradients of weights and biases by operations of torch, as rows of (32, channels).

    Rows 0 to 9 are those of the full convolution and of its bias, rows 16 to 25 those of the depthwise convolution.
    """
    dtype, channels = grad.dtype, len(weight1)
    image, is_valid = _as_image(feats, lens, dtype, padding)
    first = _apply_first(image, is_valid, weight1.to(dtype), bias1.to(dtype))
    convolution_backward = torch.ops.aten.convolution_backward
    geometry = ([2, 2], [1, 1], [1, 1], False, [0, 0])
    given = grad.permute(0, 3, 1, 2)
    of_first, *second = convolution_backward(
        given, _pad(first, padding), weight2.to(dtype), [channels], *geometry, channels, [True, True, True]
    )
    of_first = of_first[:, :, padding - 1 :, padding - 1 :]
    of_first = torch.ops.aten.threshold_backward(of_first, first, 0)
    _, *first_grads = convolution_backward(
        of_first, image, weight1.to(dtype), [channels], *geometry, 1, [False, True, True]
    )
    found = torch.zeros(32, channels, dtype=weight1.dtype, device=grad.device)
    for start, (of_weight, of_bias) in ((0, first_grads), (16, second)):
        found[start : start + 9] = of_weight.flatten(1).T
        found[start + 9] = of_bias
    return found


def _as_image(
    feats: Tensor, lens: Tensor, dtype: torch.dtype, padding: int
) -> tuple[Tensor, Bool[Tensor, "batch 1 frames2 1"]]:
    """Returns features as an image whose padding is zero, and which frames after the first stage are valid."""
    num_frames, num_frames2 = feats.shape[2], _halve(feats.shape[2], padding)
    is_valid = torch.arange(num_frames, device=feats.device) < lens.unsqueeze(1)
    image = torch.where(is_valid.unsqueeze(1), feats, 0.0).transpose(1, 2).unsqueeze(1).to(dtype)
    is_valid2 = torch.arange(num_frames2, device=feats.device) < _halve(lens, padding).unsqueeze(1)
    return _pad(image, padding), is_valid2[:, None, :, None]


def _pad(image: Tensor, padding: int) -> Tensor:
    """Returns an image for a convolution that pads it with one zero on each side."""
    return F.pad(image, (padding - 1, 0, padding - 1, 0)) if padding > 1 else image


def _apply_first(image: Tensor, is_valid: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.where(is_valid, F.conv2d(image, weight, bias, 2, 1), 0.0).relu_()


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


_first_stages.register_kernel("cpu", define_first_stages)
_first_stages.register_fake(
    lambda dtype, feats, lens, weight1, bias1, weight2, bias2, padding: torch.empty(  # noqa: ARG005 - by name
        _out_shape(feats, weight1, padding), dtype=dtype, device=feats.device
    )
)
_first_stages.register_autograd(_backward, setup_context=_keep_inputs)
_gradients.register_kernel("cpu", define_gradients)
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
