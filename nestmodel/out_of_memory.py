"""Recognises errors that PyTorch raises when an allocation fails, on a CPU as well as on a GPU."""

import torch

# cuBLAS and cuDNN report their own failed allocations, for instance CUBLAS_STATUS_ALLOC_FAILED.
# PyTorch has a type of its own for GPUs only. The CPU allocator raises a RuntimeError, whose text depends on the
# platform: "can't allocate memory" on Linux, "not enough memory" on Windows.
_MESSAGES = ("out of memory", "allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error reports that the memory of the machine or of a GPU was exhausted."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
