"""Functions compiled by torch, and settings of its compiler, which apply to the whole process."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch._dynamo as dynamo
import torch._functorch.config as functorch

from nestmodel.nn.backend import Backend

# Graphs of a function for varying shapes. Blocks need two for training, two for single cuts, and as many for
# validation; a function may need others for sizes that happen to be equal.
_GRAPHS_OF_VARYING_SHAPES = 16


def compiled_if_set(function: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """Returns what a backend calls: the function as it is, or a function that torch compiles at its first use."""
    if not backend.compiled:
        return function
    return _compile(function, None if backend.compiles_varying_shapes else False)


@cache
def _compile(function: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    """Returns a compiled function. Modules do not hold it, so that they can be copied."""
    return torch.compile(function, dynamic=dynamic)


def allow_shapes(num_shapes: int | None) -> None:
    """Lets torch compile each function for the batches of training and of validation; never lowers a limit.

    Args:
        num_shapes: Number of their shapes; None for varying shapes, for all of which a few graphs suffice.
    """
    # Once a function has as many graphs as the limit, torch runs it without compiling for new shapes.
    number = _GRAPHS_OF_VARYING_SHAPES if num_shapes is None else 2 * num_shapes + 2
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, number)
    dynamo.config.accumulated_recompile_limit = max(dynamo.config.accumulated_recompile_limit, number)


def compile_backward_in_forward() -> None:
    """Makes torch 2.10 and later compile each backward pass with its forward pass, so that errors are raised there."""
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True
    # Blocks have a function with a gradient of its own, which the cache would refuse.
    if hasattr(functorch, "autograd_cache_allow_custom_autograd_functions"):
        functorch.autograd_cache_allow_custom_autograd_functions = True
