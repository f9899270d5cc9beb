"""Which kernels a device gets, and the type in which matrix products are computed."""

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
