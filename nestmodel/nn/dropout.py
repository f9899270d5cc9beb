"""Dropout that costs little on a CPU, too.

Torch's own draws one value after the other there and keeps four bytes of mask for each: a seventh of the time and of
the memory of a training step. On a GPU it has neither fault and is used as it is.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

_LEVELS = 2**16
"""A value is dropped by 16 random bits, so its probability is a multiple of 1 / 65536."""


class Dropout(nn.Module):
    """Zeroes values at random in training, each with the same probability, and scales the others to keep the mean."""

    def __init__(self, prob: float) -> None:
        super().__init__()
        self.num_dropped = round(prob * _LEVELS)

    @property
    def share(self) -> float:
        """The probability, as it is."""
        return self.num_dropped / _LEVELS

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Drops values, in training mode, by torch's global generator of the device."""
        if not self.training or self.num_dropped == 0:
            return x
        if x.is_cuda:
            return F.dropout(x, self.share)
        # Half the time of filling by a mask; what is kept for the backward pass is a byte for each value either way.
        return (x * self._draw_kept(x)).mul_(1.0 / (1.0 - self.share))

    def _draw_kept(self, x: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        # Four values for every draw of 64 bits, read as signed numbers of 16 bits.
        bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        return bits.view(torch.int16)[: x.numel()].view(x.shape) >= self.num_dropped - _LEVELS // 2
