"""The gate, the mask and the depthwise convolution of a block as one operation of a GPU.

It also sums the moments of its outputs that batch norm needs, and the gradients of all biases.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

FRAMES_PER_PART = 32
"""Number of frames over which a program of the kernels sums moments and gradients."""

MAX_TAPS = 15
"""Largest kernel size whose window fits into the registers of a thread."""


def gated_convolution(
    gates: Float[Tensor, "batch enc_frames two_dim"],
    lens: Int[Tensor, " batch"],
    gate_bias: Float[Tensor, " two_dim"] | None,
    weight: Float[Tensor, "dim taps"],
    bias: Float[Tensor, " dim"] | None,
    left: int,
) -> tuple[Float[Tensor, "batch enc_frames dim"], Float[Tensor, "batch parts 2 dim"]]:
    """Adds biases, gates values, zeroes padded frames, and convolves each channel over time.

    Args:
        gates: Values, and after them the logits of their gates, without their bias.
        lens: Number of valid frames of each utterance.
        gate_bias: Bias of the gates: first the bias of the values, then of the logits.
        weight: Weight of the convolution, like all weights in the type of matrix products.
        bias: Bias of the convolution; None if `gate_bias` is None.
        left: Number of earlier frames that an output reads; the other frames are its own and later ones.

    Returns:
        The outputs; and for each `FRAMES_PER_PART` frames of an utterance, the mean of the outputs, and the sum of
        their squared distances to it, which `join_moments` joins. These have no gradient.
    """
    mixed, parts = _gated_convolution(gates, lens, gate_bias, weight, bias, left)
    return mixed, parts


def join_moments(
    parts: Float[Tensor, "batch parts 2 dim"], num_frames: int
) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
    """Returns mean and biased variance of the outputs of `gated_convolution`.

    Args:
        parts: Moments of the parts.
        num_frames: Number of frames of each utterance, padding included.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    starts = FRAMES_PER_PART * torch.arange(parts.shape[1], device=parts.device)
    counts = (num_frames - starts).clamp(max=FRAMES_PER_PART).unsqueeze(1).float()
    means, squares = parts.unbind(2)
    total = len(parts) * num_frames
    mean = (means * counts).sum((0, 1)) / total
    return mean, (squares + counts * (means - mean).square()).sum((0, 1)) / total


@torch.library.custom_op("nestmodel::gated_convolution", mutates_args=())
def _gated_convolution(
    gates: Tensor, lens: Tensor, gate_bias: Tensor | None, weight: Tensor, bias: Tensor | None, left: int
) -> tuple[Tensor, Tensor]:
    from nestmodel.nn.gpu.gated_convolution_kernel import launch_forward

    return launch_forward(
        gates.contiguous(), lens.contiguous(), gate_bias, weight.contiguous(), bias, left, FRAMES_PER_PART
    )


@torch.library.custom_op("nestmodel::gated_convolution_gradients", mutates_args=())
def _gradients(
    gates: Tensor, lens: Tensor, gate_bias: Tensor | None, weight: Tensor, grad: Tensor, left: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `gates`; and in float32, of shape (taps + 3, dim), of weights and three biases.

    The biases belong to the convolution, to the values and to the logits; without them, these rows are zero.
    """
    from nestmodel.nn.gpu.gated_convolution_kernel import launch_gradients

    weight, grad = weight.contiguous(), grad.contiguous()
    return launch_gradients(gates.contiguous(), lens.contiguous(), gate_bias, weight, grad, left, FRAMES_PER_PART)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    gates, lens, gate_bias, weight, _, ctx.left = inputs
    ctx.save_for_backward(gates, lens, gate_bias, weight)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gates, lens, gate_bias, weight = ctx.saved_tensors
    of_gates, sums = _gradients(gates, lens, gate_bias, weight, grad, ctx.left)
    taps, sums = weight.shape[1], sums.to(weight.dtype)
    biases = (None, None) if gate_bias is None else (sums[taps + 1 :].flatten(), sums[taps].clone())
    return of_gates, None, biases[0], sums[:taps].T, biases[1], None


@_gated_convolution.register_fake
def _(gates: Tensor, _lens: Tensor, _gate_bias: Any, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    (batch, num_frames), dim = gates.shape[:2], len(weight)
    num_parts = (num_frames + FRAMES_PER_PART - 1) // FRAMES_PER_PART
    return gates.new_empty(batch, num_frames, dim), gates.new_empty(batch, num_parts, 2, dim, dtype=torch.float32)


@_gradients.register_fake
def _(gates: Tensor, _lens: Tensor, _gate_bias: Any, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return gates.new_empty(gates.shape), weight.new_empty(weight.shape[1] + 3, len(weight), dtype=torch.float32)


_gated_convolution.register_autograd(_backward, setup_context=_keep_inputs)
