"""Weights of a block in the type of its matrix products, converted together.

Autocast converts every weight by an operation of its own: 23 for a block, and as many for the gradients. Here, one
operation converts all weights of a block, and one converts all of their gradients. Blocks are not joined, because
data-parallel training sends the gradients of one block while it computes the gradients of the blocks before it.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

FusedParameters = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Weights of one or several layers, and their biases if there are any. Both are joined along their first dimension."""

Weights = list[tuple[Tensor, Tensor | None]]
"""Weight and bias of each `FusedParameters` of a module, in their order."""


def cast_weights(modules: Sequence[Sequence[FusedParameters]], dtype: torch.dtype) -> list[Weights]:
    """Casts the parameters of several modules to a type, and fuses those that belong together.

    Args:
        modules: The joined layers of each module.
        dtype: Type of the matrix products.

    Returns:
        The weights of each module. Parameters that have the type already and need no joining are returned as they are.
    """
    groups = [group for layers in modules for layer in layers for group in layer if group]
    parameters = [parameter for group in groups for parameter in group]
    if all(parameter.dtype == dtype for parameter in parameters):
        joined = [group[0] if len(group) == 1 else torch.cat(group) for group in groups]
    else:
        joined = list(_CastTogether.apply(dtype, [len(group) for group in groups], *parameters))  # type: ignore[no-untyped-call]  # torch has no annotations for it
    return [[(joined.pop(0), joined.pop(0) if biases else None) for _, biases in layers] for layers in modules]


def fused_parameters(*layers: nn.Linear | nn.Conv1d) -> FusedParameters:
    """Returns the weights and the biases of layers that read the same input."""
    return tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers if layer.bias is not None)


class _CastTogether(torch.autograd.Function):
    """Copies parameters into one buffer of another type, group by group, and their gradients back into another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, sizes: list[int], *parameters: Tensor) -> tuple[Tensor, ...]:
        first, shapes = parameters[0], [parameter.shape for parameter in parameters]
        ctx.sizes, ctx.shapes, ctx.dtype = sizes, shapes, first.dtype
        buffer = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=first.device)
        torch._foreach_copy_(_views(buffer, shapes), list(parameters))
        return tuple(_views(buffer, [_joined_shape(group) for group in _in_groups(shapes, sizes)]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shapes: list[torch.Size] = ctx.shapes
        buffer = torch.empty(sum(map(math.prod, shapes)), dtype=ctx.dtype, device=grads[0].device)
        cast_grads = _views(buffer, shapes)
        groups = zip(grads, _in_groups(shapes, ctx.sizes), strict=True)
        torch._foreach_copy_(
            cast_grads, [part for grad, group in groups for part in grad.split([size[0] for size in group])]
        )
        needed = ctx.needs_input_grad[2:]
        return None, None, *(grad if is_needed else None for grad, is_needed in zip(cast_grads, needed, strict=True))


def _joined_shape(shapes: list[torch.Size]) -> torch.Size:
    return torch.Size([sum(shape[0] for shape in shapes), *shapes[0][1:]])


def _views(buffer: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    parts = buffer.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _in_groups(shapes: list[torch.Size], sizes: list[int]) -> Iterator[list[torch.Size]]:
    rest = iter(shapes)
    return (list(islice(rest, size)) for size in sizes)
