"""Types of matrix products: the type of autocast, and a type that TF32 does not round."""

import torch
from jaxtyping import Float
from torch import Tensor


def is_autocast(x: Tensor) -> bool:
    """Returns True if autocast converts `x`; it does not convert float64."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the type of matrix products of `x`: the type of autocast where it is on, otherwise the type of `x`."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype


def exact_dtype(x: Tensor) -> torch.dtype:
    """Returns the type for products that TF32 must not round: float64 on a GPU, otherwise the type of `x`.

    TF32 keeps 10 bits of each factor of a product of float32.
    """
    return torch.float64 if x.is_cuda else x.dtype


def exact_matmul(left: Float[Tensor, "*left"], right: Float[Tensor, "*right"]) -> Float[Tensor, "*product"]:
    """Multiplies float32 matrices in full precision, even if the run allows TF32, which can change tokens."""
    dtype = exact_dtype(left)
    return (left.to(dtype) @ right.to(dtype)).to(left.dtype)
