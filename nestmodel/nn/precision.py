"""The type in which matrix products have full precision."""

import torch
from jaxtyping import Float
from torch import Tensor


def exact_dtype(x: Tensor) -> torch.dtype:
    """Returns a type in which a product with `x`, float32 or float64, has the full precision of its type.

    On a GPU, products of float32 may be reduced to TF32, which keeps 10 bits of a factor; those of float64 are not.
    """
    return torch.float64 if x.is_cuda else x.dtype


def exact_matmul(left: Float[Tensor, "*left"], right: Float[Tensor, "*right"]) -> Float[Tensor, "*product"]:
    """Multiplies float32 matrices in full precision, even if the run allows TF32, which can change tokens."""
    dtype = exact_dtype(left)
    return (left.to(dtype) @ right.to(dtype)).to(left.dtype)
