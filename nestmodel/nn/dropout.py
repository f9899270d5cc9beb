"""Dropout that is also cheap on a CPU.

On a CPU, torch's dropout draws one value after the other and keeps a mask of four bytes per value: a seventh of the
time and of the memory of a training step. On a GPU it has neither drawback and is used directly.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nestmodel.nn import devices

_LEVELS = 2**16
"""A value is dropped according to 16 random bits, so the probability is a multiple of 1 / 65536."""


class Dropout(nn.Module):
    """Zeroes values at random in training, with equal probability, and scales the others to preserve the mean."""

    def __init__(self, prob: float) -> None:
        super().__init__()
        self.num_dropped = round(prob * _LEVELS)

    @property
    def prob(self) -> float:
        """The probability in effect, rounded to a multiple of 1 / 65536."""
        return self.num_dropped / _LEVELS

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Drops values in training mode, drawing from torch's global generator of the device."""
        if not self.training or self.num_dropped == 0:
            return x
        if devices.is_on_gpu(x):
            return F.dropout(x, self.prob)
        # This takes half the time of `masked_fill`. Both keep one byte per value for the backward pass.
        return (x * self._draw_kept(x)).mul_(1.0 / (1.0 - self.prob))

    def _draw_kept(self, x: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        # Each draw of 64 bits serves four values, as four signed 16-bit integers.
        bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        return bits.view(torch.int16)[: x.numel()].view(x.shape) >= self.num_dropped - _LEVELS // 2
