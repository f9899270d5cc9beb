"""Which kernels a device gets, and the type in which matrix products are computed."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def is_on_gpu(x: Tensor) -> bool:
    """Returns True if a tensor is on a GPU. Tests replace this function to run the code for GPUs on a CPU."""
    return x.is_cuda


def is_autocast(x: Tensor) -> bool:
    """Returns True if autocast converts `x`; it does not convert float64."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the type of matrix products of `x`: that of autocast where it is on, otherwise that of `x`."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype


def has_kernel(check: Callable[[], bool], otherwise: str) -> bool:
    """Returns whether a kernel in Triton works on this machine. If it does not, warns what that means.

    Args:
        check: Runs the kernel, and returns whether it computes what torch computes.
        otherwise: What is the case without the kernel.
    """
    try:
        if check():
            return True
        cause = "the kernel for it computes other numbers than torch"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler can fail in many ways
        reason = " ".join(str(error).split()).rstrip(".")
        cause = f"Triton fails: {reason}. It needs a C compiler and the headers of Python"
    warnings.warn(f"{otherwise}, because {cause}.", stacklevel=3)
    return False
