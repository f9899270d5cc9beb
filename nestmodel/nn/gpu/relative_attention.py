"""Attention with relative positions on a GPU: products of matrices, and one kernel for the softmax between them.

This module also holds positions and lengths of the frames of a batch as the code for GPUs reads them. Sizes are padded
to multiples for which products are fast, with zeros that change no result.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int32
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from nestmodel.attention_context import UNLIMITED, Context, Style
from nestmodel.nn.attention import RelPositionAttention, in_chunks, relative_positions
from nestmodel.nn.dropout import Key
from nestmodel.nn.gpu.cast_weights import FusedParameters, Weights, fused_parameters
from nestmodel.nn.precision import product_dtype

_MULTIPLE = 8
"""Products of 16-bit types are fast on a GPU if sizes are multiples of this."""

MAX_KEYS = 2**14
"""Longest row of scores that fits into the registers of a program."""

_FAR = 2**30
"""More frames than any utterance has."""


class GpuFrames(NamedTuple):
    """Positions, lengths and limits of attention of the frames of a batch."""

    positions: Float[Tensor, "positions dim"]
    """`relative_positions` of the frames, twice as many as the number of frames rounded up to a multiple of 8."""

    lens: Int[Tensor, " batch"]
    """Number of valid frames of each utterance."""

    limits: Int32[Tensor, "3"] | None
    """Chunks to the left and to the right that a query attends to, and frames of a chunk; None for no limits."""


def describe_gpu_frames(
    x: Float[Tensor, "batch enc_frames dim"],
    enc_lens: Int[Tensor, " batch"],
    context: Context | None = None,
    style: Style = "regular",
) -> GpuFrames:
    """Does the same as `describe_frames`, in the form that kernels of a GPU read."""
    num_frames, dim = x.shape[1:]
    # More distances than needed, so that products with the encodings have a multiple of 8 columns.
    positions = relative_positions(num_frames, dim, x.device, num_distances=2 * _round_up(num_frames))
    limits = None if context is None else _limits(context, style, x.device)
    return GpuFrames(positions.to(product_dtype(x)), enc_lens, limits)


def _limits(context: Context, style: Style, device: torch.device) -> Int32[Tensor, "3"]:
    """Returns `GpuFrames.limits`; filled on the GPU, because a copy would wait for it."""
    sizes = (_FAR if size == UNLIMITED else size for size in in_chunks(context, style))
    return torch.stack([torch.full((), size, dtype=torch.int32, device=device) for size in sizes])


def _round_up(size: int) -> int:
    """Returns the smallest multiple of 8 that is not below `size`."""
    return -(-size // _MULTIPLE) * _MULTIPLE


def attention_parameters(module: RelPositionAttention) -> list[FusedParameters]:
    """Returns the parameters that `attend` reads: three projections and the position biases are joined."""
    return [
        fused_parameters(module.linear_q, module.linear_k, module.linear_v),
        fused_parameters(module.linear_pos),
        ((module.pos_bias_u, module.pos_bias_v), ()),
        fused_parameters(module.linear_out),
    ]


def attend(
    module: RelPositionAttention,
    x: Float[Tensor, "batch enc_frames dim"],
    frames: GpuFrames,
    weights: Weights,
    key: Key | None,
) -> Float[Tensor, "batch enc_frames dim"]:
    """Applies `module`; see `RelPositionAttention.forward`.

    Args:
        module: The attention.
        x: Encoder frames.
        frames: Their positions, lengths and limits.
        weights: Parameters of `attention_parameters`, converted by `cast_weights`.
        key: Key of the dropout in training; without it, the generator of the GPU draws one.
    """
    (in_weight, in_bias), (pos_weight, _), (biases, _), (out_weight, out_bias) = weights
    num_dropped = module.dropout.num_dropped if module.training else 0
    if num_dropped == 0:
        key = None
    elif key is None:
        key = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=x.device)
    qkv = F.linear(x.to(product_dtype(x)), in_weight).unflatten(2, (3, module.num_heads, -1))
    positions = F.linear(frames.positions, pos_weight).unflatten(1, (module.num_heads, -1))
    head_dim = qkv.shape[4]
    if head_dim % _MULTIPLE:
        positions = F.pad(positions, (0, -head_dim % _MULTIPLE))
    positions = positions.transpose(0, 1).contiguous()
    biases = biases.unflatten(0, (2, -1))
    mixed, *_ = _attention(qkv, in_bias, positions, biases, frames.lens, frames.limits, key, num_dropped)
    # (batch, heads, enc_frames, width) -> (batch, enc_frames, heads, head_dim)
    return F.linear(mixed.transpose(1, 2)[..., :head_dim].flatten(2), out_weight, out_bias)


@torch.library.custom_op("nestmodel::relative_attention", mutates_args=())
def _attention(
    qkv: Tensor,
    in_bias: Tensor | None,
    positions: Tensor,
    biases: Tensor,
    lens: Tensor,
    limits: Tensor | None,
    key: Tensor | None,
    num_dropped: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the attended values within the limits, (batch, heads, enc_frames, width); zero for padded frames.

    Args:
        qkv: Queries, keys and values without their bias: (batch, enc_frames, 3, heads, head_dim).
        in_bias: Their bias: (3 * heads * head_dim,).
        positions: Projected encodings of the distances enc_frames - 1 and below: (heads, 2 * keys, width).
        biases: Biases of the queries for the scores by content and by position: (2, heads, head_dim).
        lens: As in `GpuFrames`.
        limits: As in `GpuFrames`.
        key: Key of the dropout of weights; None drops nothing.
        num_dropped: Probability with which a weight is dropped, times 65536.

    Returns:
        The attended values; and for the backward pass, the weights before dropout, (batch, heads, enc_frames, keys),
        and `heads_kernel.Heads`.
    """
    from nestmodel.nn.gpu.attention_weights_kernel import launch_weights
    from nestmodel.nn.gpu.heads_kernel import launch_split

    num_keys, width = positions.shape[1] // 2, positions.shape[2]
    content, position, keys, values = launch_split(qkv.contiguous(), in_bias, biases.contiguous(), num_keys, width)
    # One product for each head, with the rows of all utterances: torch would copy the positions for each utterance.
    by_distance = torch.bmm(position, positions.mT)
    weights, kept = launch_weights(
        _multiply(content, keys.mT), by_distance, lens.contiguous(), limits, key, num_dropped
    )
    return _multiply(kept, values), weights, content, position, keys, values


@torch.library.custom_op("nestmodel::relative_attention_gradients", mutates_args=())
def _gradients(
    grad: Tensor,
    weights: Tensor,
    content: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    key: Tensor | None,
    num_dropped: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `qkv`, `positions` and, in float32, of all biases, as `launch_join` does.

    `grad` is the gradient of the first output of `_attention`; the tensors after it are the other outputs.
    """
    from nestmodel.nn.gpu.attention_weights_kernel import launch_gradients
    from nestmodel.nn.gpu.heads_kernel import launch_join

    of_scores, by_distance, kept = launch_gradients(weights, _multiply(grad, values.mT), key, num_dropped)
    of_keys, of_values = _multiply(of_scores.mT, content), _multiply(kept.mT, grad)
    heads = _multiply(of_scores, keys), torch.bmm(by_distance, positions), of_keys, of_values
    of_qkv, of_biases = launch_join(heads, content.shape[2], head_dim)
    return of_qkv, torch.bmm(by_distance.mT, position), of_biases


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Returns the products of matrices of each utterance and head."""
    products: Tensor = torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])
    return products


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, in_bias, positions, biases, _, _, key, ctx.num_dropped = inputs
    ctx.head_dim, ctx.has_bias, ctx.dtype = qkv.shape[4], in_bias is not None, biases.dtype
    ctx.save_for_backward(*output[1:], positions, key)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # otherwise, zeros would be written for outputs without a gradient


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    of_qkv, of_positions, sums = _gradients(grad.contiguous(), *saved, ctx.num_dropped, ctx.head_dim)
    of_in_bias = sums[:3].flatten().to(ctx.dtype) if ctx.has_bias else None
    of_biases = sums[3:].view(2, -1, ctx.head_dim).to(ctx.dtype)
    return of_qkv, of_in_bias, of_positions, of_biases, None, None, None, None


@_attention.register_fake
def _(qkv: Tensor, _in_bias: Any, positions: Tensor, *_: Any) -> tuple[Tensor, ...]:
    batch, num_frames, num_heads = qkv.shape[0], qkv.shape[1], qkv.shape[3]
    num_keys, width = positions.shape[1] // 2, positions.shape[2]
    content, position = (batch, num_heads, num_frames, width), (num_heads, batch * num_frames, width)
    keys, weights = (batch, num_heads, num_keys, width), (batch, num_heads, num_frames, num_keys)
    return tuple(map(qkv.new_empty, (content, weights, content, position, keys, keys)))


@_gradients.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    positions, head_dim = inputs[5], inputs[-1]
    batch, num_heads, num_frames, _ = grad.shape
    of_biases = grad.new_empty(5, num_heads * head_dim, dtype=torch.float32)
    return grad.new_empty(batch, num_frames, 3, num_heads, head_dim), torch.empty_like(positions), of_biases


_attention.register_autograd(_backward, setup_context=_keep_inputs)


@register_flop_formula(torch.ops.nestmodel.relative_attention)
def _count_flops(qkv: torch.Size, _in_bias: Any, positions: torch.Size, *_: Any, **__: Any) -> int:
    """Returns the operations of the products with keys, with values and with positions."""
    return int(4 * qkv[0] * qkv[1] * math.prod(positions))


@register_flop_formula(torch.ops.nestmodel.relative_attention_gradients)
def _count_flops_of_gradients(grad: torch.Size, *inputs: Any, **_: Any) -> int:
    return int(8 * grad[0] * grad[2] * math.prod(inputs[5]))
