"""Which code a device gets, and whether a kernel works on it."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_NORM_FLOOR = 0.01
"""Allowed rounding is relative to the norm of a gradient, or to this share of the largest norm if that is more."""


def is_on_gpu(x: Tensor) -> bool:
    """Returns True if a tensor is on a GPU. Tests replace this function to run the code for GPUs on a CPU."""
    return x.is_cuda


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a kernel in Triton on the device of its first argument, unless there is nothing to compute."""
    if all(grid):
        with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
            kernel[grid](*arguments, **constants)


def has_kernel(check: Callable[[], bool], otherwise: str) -> bool:
    """Returns whether a kernel in Triton works on this machine. If it does not, warns about the consequence.

    Args:
        check: Runs the kernel, and returns whether it computes what torch computes.
        otherwise: The consequence if the kernel does not work, as the beginning of the warning.
    """
    try:
        if check():
            return True
        cause = "the kernel for it computes other numbers than torch"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler can fail in many ways
        reason = " ".join(str(error).split()).rstrip(".")
        cause = f"Triton fails: {reason}. If a compiler is missing: it needs a C compiler and the headers of Python"
    warnings.warn(f"{otherwise}, because {cause}.", stacklevel=3)
    return False


def is_right(
    compute: Callable[[torch.device, torch.dtype, bool], Sequence[Tensor]], device: torch.device, dtype: torch.dtype
) -> bool:
    """Returns whether kernels are as close to float64 as operations of torch are, up to a factor of two.

    Args:
        compute: Returns outputs and gradients in float64 on the CPU. Its arguments are the device and the type of
            products, and whether kernels compute them.
        device: Device that is tried.
        dtype: Type of products that is tried.
    """
    # The first forward pass of a process may be one without gradients.
    with torch.inference_mode(mode=False), torch.enable_grad():
        exact = compute(torch.device("cpu"), torch.float64, False)
        plain, found = compute(device, dtype, False), compute(device, dtype, True)
    smallest, rounding = _NORM_FLOOR * max(float(each.norm()) for each in exact), max(1e-5, 4 * torch.finfo(dtype).eps)
    return all(
        bool((ours - x).norm() <= 2 * (theirs - x).norm() + rounding * max(float(x.norm()), smallest))
        for ours, theirs, x in zip(found, plain, exact, strict=True)
    )
