"""Dropout whose decisions are a function of a key and of the position of a value.

Whether a value is dropped depends on 16 bits. For value i, they are one half of a hash of i // 2 and of a key of two
32-bit numbers, the lower half if i is even. So the decisions are the same on every device and in compiled code. Numbers
wrap around at 32 bits everywhere.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int16, Int32
from torch import Tensor, nn

Key = Int32[Tensor, "2"]
"""Determines what one dropout of the network drops in one microbatch; see `draw_keys`."""

LEVELS = 2**16
"""A value is dropped according to 16 random bits, so the probability is a multiple of 1 / 65536."""

FACTORS = (0x9E3779B1 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32)
"""Odd factors of the hash, as signed numbers: 2^32 over the golden ratio, and the two factors of "lowbias32".

Source of "lowbias32": Hash Function Prospector by Chris Wellons.
"""

_PAIRS_PER_PART = 2**15
"""Pairs of values that a thread of a CPU decides about at once, so that their hashes stay in its cache."""


def draw_keys(seed: int, *shape: int) -> Int32[Tensor, "*shape 2"]:
    """Returns keys that are drawn from a seed, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (*shape, 2), dtype=torch.int32, generator=generator)


class Dropout(nn.Module):
    """Zeroes values at random in training, with equal probability, and scales the others to preserve the mean."""

    def __init__(self, prob: float, *, counts_from: int = 0) -> None:
        """Sets the probability.

        Args:
            prob: Probability with which a value is dropped, rounded to a multiple of 1 / 65536.
            counts_from: See `drop`.
        """
        super().__init__()
        self.num_dropped = round(prob * LEVELS)
        self._counts_from = counts_from

    @property
    def prob(self) -> float:
        """The probability in effect, rounded to a multiple of 1 / 65536."""
        return self.num_dropped / LEVELS

    def forward(self, x: Float[Tensor, "*shape"], key: Key | None = None) -> Float[Tensor, "*shape"]:
        """Drops values in training mode.

        Args:
            x: Fewer than 2^31 values.
            key: Determines which values are dropped; None draws from torch's global generator of the device.
        """
        if not self.training or self.num_dropped == 0:
            return x
        if key is not None and (x.is_cuda or torch.compiler.is_compiling()):
            # The compiler fuses this with the operations around it.
            return drop(x, key, self.num_dropped, counts_from=self._counts_from)
        if x.is_cuda:
            return F.dropout(x, self.prob)
        # torch's dropout draws one value after the other and keeps a mask of four bytes per value. This mask has one.
        bits = _draw_bits(x.numel()) if key is None else _hash_bits(x.numel(), key)
        is_kept = bits.view(x.shape) >= _threshold(self.num_dropped)
        return (x * is_kept).mul_(keep_scale(self.num_dropped))


def drop(x: Float[Tensor, "*shape"], key: Key, num_dropped: int, *, counts_from: int = 0) -> Float[Tensor, "*shape"]:
    """Zeroes values and scales the others. This is the definition; the code for a CPU and for a GPU is faster.

    Args:
        x: Values.
        key: Determines which values are dropped.
        num_dropped: Probability with which a value is dropped, times 65536.
        counts_from: Number from which positions are counted, and which is subtracted again. If two dropouts of a block
            with many values count from the same number, torch's compiler counts once for both, and stores the decisions
            of the second for the backward pass instead of computing them again.
    """
    positions = torch.arange(counts_from, counts_from + x.numel(), dtype=torch.int32, device=x.device) - counts_from
    position = positions.view(x.shape)
    key1, key2 = key.unbind()
    # The half that decides becomes the upper one.
    half = mix(FACTORS[0] * (position >> 1) + key1, key2) << (16 - 16 * (position & 1))
    return torch.where(half >= _threshold(num_dropped) * LEVELS, x * keep_scale(num_dropped), 0.0)


def mix(x: Int32[Tensor, "*shape"], key2: Int32[Tensor, ""]) -> Int32[Tensor, "*shape"]:
    """Returns a hash of 32 bits of each number and of the second half of a key; the first half is in the number."""
    x = (x ^ _shifted(x, 16)) * FACTORS[1] + key2
    x = (x ^ _shifted(x, 15)) * FACTORS[2]
    return x ^ _shifted(x, 16)


def _shifted(x: Int32[Tensor, "*shape"], bits: int) -> Int32[Tensor, "*shape"]:
    """Shifts to the right and fills with zeros; torch's shift of signed numbers fills with the sign."""
    shifted: Tensor = (x >> bits) & (2 ** (32 - bits) - 1)
    return shifted


def _threshold(num_dropped: int) -> int:
    """Returns the smallest signed 16-bit number that keeps a value."""
    return num_dropped - LEVELS // 2


def keep_scale(num_dropped: int) -> float:
    """Returns the factor of the values that are kept."""
    return LEVELS / (LEVELS - num_dropped)


def _draw_bits(number: int) -> Int16[Tensor, " number"]:
    """Draws random numbers from the global generator, four at once."""
    return torch.empty((number + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:number]


def _hash_bits(number: int, key: Key) -> Int16[Tensor, " number"]:
    """Returns the bits that decide about each position, computed part by part to save passes over memory."""
    key1, key2 = key.tolist()
    hashes = torch.empty((number + 1) // 2, dtype=torch.int32)
    size = _PAIRS_PER_PART * torch.get_num_threads()
    products = FACTORS[0] * torch.arange(min(size, len(hashes)), dtype=torch.int32)
    buffer = torch.empty_like(products)
    for start, part in zip(range(0, len(hashes), size), hashes.split(size), strict=False):
        shifted = buffer[: len(part)]
        torch.add(products[: len(part)], _wrapped(FACTORS[0] * start + key1), out=part)
        _xor_shifted(part, 16, shifted).mul_(FACTORS[1]).add_(key2)
        _xor_shifted(part, 15, shifted).mul_(FACTORS[2])
        _xor_shifted(part, 16, shifted)
    return hashes.view(torch.int16)[:number]


def _xor_shifted(x: Tensor, bits: int, shifted: Tensor) -> Tensor:
    torch.bitwise_right_shift(x, bits, out=shifted).bitwise_and_(2 ** (32 - bits) - 1)
    return x.bitwise_xor_(shifted)


def _wrapped(number: int) -> int:
    """Returns the signed 32-bit number that equals a number modulo 2^32."""
    return (number + 2**31) % 2**32 - 2**31
