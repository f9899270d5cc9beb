"""Suppresses DDP's advice to turn off `find_unused_parameters`, which is on for another purpose.

DDP prints it once in each process, if a forward pass has used all parameters. It is a C++ warning, which reaches
Python's warning filters only inside a function of torch that converts such warnings, and DDP's forward pass is none.
`TORCH_CPP_LOG_LEVEL` would hide every other warning of C++ code as well.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def suppress_unused_parameter_advice(device: torch.device) -> None:
    """Makes DDP give its advice now, to a filter that drops it. A collective call: every rank has to make it."""
    model = DistributedDataParallel(nn.Linear(1, 1, device=device), find_unused_parameters=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        _WithPythonWarnings.apply(torch.zeros(1, 1, device=device, requires_grad=True), model)  # type: ignore[no-untyped-call]  # torch has no annotations for it


class _WithPythonWarnings(torch.autograd.Function):
    """Calls a module where torch converts C++ warnings into Python's."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        with torch.enable_grad():
            module(x)
        return x.clone()
