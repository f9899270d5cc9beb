"""Which code a device gets, and whether a kernel works on it."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def is_on_gpu(x: Tensor) -> bool:
    """Returns True if a tensor is on a GPU. Tests replace this function to run the code for GPUs on a CPU."""
    return x.is_cuda


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
