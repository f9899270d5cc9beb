"""Weights of a block in the type of its matrix products, converted together.

Autocast converts every weight by an operation of its own: 23 for a block, each with a gradient that is converted back
by another one. Here, one operation converts all weights of a block, and one converts all of their gradients. Weights
of one block only, because data-parallel training sends the gradients of a block while those of the blocks before it
are computed.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

JoinedLayers = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Weights of one or several layers, and their biases if there are any: to be joined along their first dimension."""

Weights = list[tuple[Tensor, Tensor | None]]
"""Weight and bias of each entry of a module's `joined_layers`, in their order."""


def lower_weights(modules: Sequence[Sequence[JoinedLayers]], dtype: torch.dtype) -> list[Weights]:
    """Converts the parameters of several modules to a type, and joins those that belong together.

    Args:
        modules: The joined layers of each module.
        dtype: Type of the matrix products.

    Returns:
        The weights of each module. Parameters that have the type already and need no joining are returned as they are.
    """
    groups = [group for layers in modules for layer in layers for group in layer if group]
    parameters = [parameter for group in groups for parameter in group]
    if all(parameter.dtype == dtype for parameter in parameters) or torch.compiler.is_compiling():
        # A compiler fuses the conversions itself.
        joined = [_join([parameter.to(dtype) for parameter in group]) for group in groups]
    else:
        joined = list(_Lower.apply(dtype, [len(group) for group in groups], *parameters))  # type: ignore[no-untyped-call]  # torch has no annotations for it
    return [[(joined.pop(0), joined.pop(0) if biases else None) for _, biases in layers] for layers in modules]


def joined_layers(*layers: nn.Linear | nn.Conv1d) -> JoinedLayers:
    """Returns the weights and the biases of layers that read the same input."""
    return tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers if layer.bias is not None)


def own_weights(layers: Sequence[JoinedLayers]) -> Weights:
    """Returns the parameters themselves, if none are joined with others."""
    return [(weights[0], biases[0] if biases else None) for weights, biases in layers]


class _Lower(torch.autograd.Function):
    """Copies parameters into one buffer of another type, group by group, and their gradients back into another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, sizes: list[int], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.like = sizes, [parameter.detach() for parameter in parameters]
        buffer = torch.empty(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        copies = _views(buffer, parameters)
        torch._foreach_copy_(copies, list(parameters))
        num_values = [sum(p.numel() for p in group) for group in _in_groups(parameters, sizes)]
        groups = zip(buffer.split(num_values), _in_groups(parameters, sizes), strict=True)
        return tuple(joined.view(-1, *group[0].shape[1:]) for joined, group in groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        like: list[Tensor] = ctx.like
        buffer = torch.empty(sum(p.numel() for p in like), dtype=like[0].dtype, device=like[0].device)
        raised = _views(buffer, like)
        groups = zip(grads, _in_groups(like, ctx.sizes), strict=True)
        torch._foreach_copy_(raised, [part for grad, group in groups for part in grad.split([len(p) for p in group])])
        needed = ctx.needs_input_grad[2:]
        return None, None, *(grad if is_needed else None for grad, is_needed in zip(raised, needed, strict=True))


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = buffer.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _in_groups(tensors: Sequence[Tensor], sizes: list[int]) -> Iterator[list[Tensor]]:
    rest = iter(tensors)
    return (list(islice(rest, size)) for size in sizes)
