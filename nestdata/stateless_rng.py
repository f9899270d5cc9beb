"""Stateless random numbers: functions of a key, independent of the order of calls, worker, rank and global state.

A key is `(seed, purpose, counters...)`. `Permutation`, which decides which cut is in which batch, and the scalar
numbers of `StatelessRng` are computed here in integer arithmetic, because NumPy's distributions may change between
versions. NumPy is used only to fill arrays with normal noise.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

_MASK_64 = (1 << 64) - 1
# Increment of the state of SplitMix64: 2^64 divided by the golden ratio, rounded to an odd number.
_INCREMENT = 0x9E3779B97F4A7C15
# Rounds of the Feistel network.
_ROUNDS = 8


def derive_key(seed: int, purpose: str, *counters: int) -> int:
    """Returns a 64-bit hash of the arguments, equal on every machine and in every version.

    Args:
        seed: Seed of the run.
        purpose: What is drawn, such as "noise". Different purposes get independent numbers.
        counters: What it is drawn for, such as step, microbatch and position. Not the cut, because a cut that is seen
            twice in an epoch would get the same noise twice.
    """
    text = "/".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class StatelessRng:
    """A sequence of random numbers that is determined by one key; takes the arguments of `derive_key`."""

    def __init__(self, seed: int, purpose: str, *counters: int) -> None:
        self._key = derive_key(seed, purpose, *counters)
        self._state = self._key

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Returns a number from [low, high) with 53 random bits."""
        return low + (high - low) * (self._word() >> 11) * 2.0**-53

    def below(self, bound: int) -> int:
        """Returns an integer from [0, bound); the bias is below bound / 2^64."""
        return (self._word() * bound) >> 64

    def between(self, low: int, high: int) -> int:
        """Returns an integer from [low, high], both ends included."""
        return low + self.below(high - low + 1)

    def distinct(self, count: int, bound: int) -> list[int]:
        """Returns `count` different integers from [0, bound), in random order.

        `count` is at most `bound`. Time and memory depend only on `count`: a sparse Fisher-Yates shuffle, which stores
        only the moved positions.
        """
        moved: dict[int, int] = {}
        chosen = []
        for i in range(count):
            j = self.between(i, bound - 1)
            chosen.append(moved.get(j, j))
            moved[j] = moved.get(i, i)
        return chosen

    def normal(self, num_samples: int) -> NDArray[np.float32]:
        """Returns standard normal samples, shape (num_samples,)."""
        bits = np.random.Philox(key=[self._key, self._word()])
        return np.random.Generator(bits).standard_normal(num_samples, dtype=np.float32)

    def _word(self) -> int:
        """Returns the next 64 bits of SplitMix64.

        Most keys are used for about three numbers, and creating a Philox generator for them would take 9 µs.
        """
        self._state += _INCREMENT
        return _mix(self._state)


class Permutation:
    """A keyed bijection of [0, size) that is evaluated at any position in constant time and memory.

    Positions are written as (left, right) on a grid of about sqrt(size) by sqrt(size) and pass through eight rounds of
    an alternating Feistel network. An image outside [0, size) is encrypted again until it is inside, which is rare
    because the grid has only slightly more than `size` cells.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), generalised Feistel and cycle walking.
    """

    def __init__(self, size: int, key: int) -> None:
        if size < 1:
            raise ValueError(f"size is {size}: a permutation needs at least one element")
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        self._round_keys = [_mix(key + i * _INCREMENT) for i in range(1, _ROUNDS + 1)]

    def at(self, position: int) -> int:
        """Returns the image of one position, ten times as fast as a call with an array of one position."""
        image = self._encrypt_one(position)
        while image >= self.size:
            image = self._encrypt_one(image)
        return image

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the images of positions in [0, size), with the same shape."""
        images = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(images >= self.size)
        while outside.size:
            images[outside] = self._encrypt(images[outside])
            outside = outside[images[outside] >= self.size]
        return images.astype(np.int64)

    def _encrypt(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        left, right = positions // columns, positions % columns
        for i, key in enumerate(self._round_keys):
            if i % 2 == 0:
                left = (left + _mix_array(right + np.uint64(key)) % rows) % rows
            else:
                right = (right + _mix_array(left + np.uint64(key)) % columns) % columns
        return left * columns + right

    def _encrypt_one(self, position: int) -> int:
        left, right = divmod(position, self._columns)
        for i, key in enumerate(self._round_keys):
            if i % 2 == 0:
                left = (left + _mix(right + key) % self._rows) % self._rows
            else:
                right = (right + _mix(left + key) % self._columns) % self._columns
        return left * self._columns + right


def _mix(word: int) -> int:
    """Applies the finaliser of SplitMix64 (Steele, Lea and Flood, 2014): one input bit flips half the output bits."""
    word &= _MASK_64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return word ^ (word >> 31)


def _mix_array(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies `_mix` to every element; the arithmetic wraps at 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
