"""`nestmodel.nn.dropout.drop` as one kernel of a GPU, for blocks that are not compiled."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestmodel.nn.dropout import FACTORS
from nestmodel.nn.gpu.devices import launch

VALUES_PER_PROGRAM = 2048
MAX_VALUES = 2**31 - 1
"""Positions are signed 32-bit numbers."""

_FACTOR0, _FACTOR1, _FACTOR2 = (tl.constexpr(factor % 2**32) for factor in FACTORS)


def launch_drop(x: Tensor, key: Tensor, num_dropped: int, scale: float) -> Tensor:
    """Zeroes values and scales the others, in float32.

    Args:
        x: Values.
        key: Determines which values are dropped; int32, two numbers, on the device of `x`.
        num_dropped: Probability with which a value is dropped, times 65536.
        scale: Factor of the values that are kept.

    Raises:
        ValueError: There are 2^31 values or more.
    """
    if x.numel() > MAX_VALUES:
        raise ValueError(f"dropout of {x.numel()} values: the limit is {MAX_VALUES}; lower data.plan.max_batch_seconds")
    x = x.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), VALUES_PER_PROGRAM),)
    launch(drop_kernel, grid, x, key, out, x.numel(), num_dropped, scale, VALUES_PER_PROGRAM)
    return out


@triton.jit
@no_type_check
def is_kept(position, key, num_dropped):
    """Returns which positions are kept. Positions and all numbers of the hash are unsigned."""
    mixed = (position >> 1) * _FACTOR0 + tl.load(key).to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * _FACTOR1 + tl.load(key + 1).to(tl.uint32)
    mixed = (mixed ^ (mixed >> 15)) * _FACTOR2
    mixed = mixed ^ (mixed >> 16)
    half = (mixed >> (16 * (position & 1))) & 0xFFFF
    # `num_dropped` is a threshold for signed halves; flipping the sign bit maps them to unsigned numbers in order.
    return (half ^ 0x8000) >= num_dropped


@triton.jit(do_not_specialize_on_alignment=["key"])
@no_type_check
def drop_kernel(x, key, out, num_values, num_dropped, scale, size: tl.constexpr):
    """Applies the decisions about `size` values."""
    position = (tl.program_id(0) * size + tl.arange(0, size)).to(tl.uint32)
    is_value = position < num_values
    value = tl.load(x + position, mask=is_value)
    kept = tl.where(is_kept(position, key, num_dropped), value.to(tl.float32) * scale, 0.0)
    tl.store(out + position, kept.to(value.dtype), mask=is_value)
