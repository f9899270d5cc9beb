"""Sums of gradients over the microbatches of an optimizer step."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class GradientSums:
    """Adds up the gradients of microbatches by one operation for all parameters.

    Torch adds each gradient by an operation of its own: on a GPU, 600 launches for a microbatch of `large`. A parameter
    without a gradient takes over a new one without an operation. So the sums are set aside during a backward pass, and
    the new gradients are added to them after it. Both need memory at the end of the backward pass, which has usually
    freed more than that. Until `add`, the parameters have the gradients of one microbatch.

    Args:
        parameters: Those that are trained.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: list[tuple[nn.Parameter, Tensor]] = []

    def set_aside(self) -> None:
        """Removes the gradients from the parameters, before a backward pass."""
        self._sums = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, _ in self._sums:
            parameter.grad = None

    def add(self) -> None:
        """Adds the gradients of the parameters to those that were set aside, and gives the parameters the sums."""
        summed = [(total, parameter.grad) for parameter, total in self._sums if parameter.grad is not None]
        if summed:
            torch._foreach_add_([total for total, _ in summed], [new for _, new in summed])
        for parameter, total in self._sums:
            parameter.grad = total
        self._sums = []
