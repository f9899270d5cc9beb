"""Resampling by windowed sinc interpolation, in bounded memory for every pair of rates.

torchaudio keeps the filter as a dense kernel: one row for each of the `rate / gcd` phases of the output, as long as the
`source_rate / gcd` samples after which the phases repeat. For common rates that is at most a few megabytes. For rates
with a small common divisor it is up to a gigabyte, most of it zeros, and ten times as much while it is computed. For
those pairs, the few weights that are not zero are computed for each sample.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

# Elements of the largest kernel that torchaudio computes: 4 MB. Kernels are smaller for resampling from the rates of
# audio and video equipment, 8 kHz to 192 kHz, to 16 kHz.
_MAX_KERNEL = 1 << 20
# The cache of a process holds at most 64 MB.
_MAX_KERNELS = 16
# The filter: torchaudio's defaults.
_ZERO_CROSSINGS = 6
_ROLLOFF = 0.99
# Weights that are computed at a time.
_BLOCK = 1 << 16


def resample(samples: NDArray[np.float32], source_rate: int, rate: int) -> NDArray[np.float32]:
    """Resamples audio of shape (num_samples,) from one rate to another, both in Hz.

    The first sample keeps its time. A part of the audio is resampled as if there were silence around it. For pairs of
    rates with a small kernel, the result has the same bits as torchaudio's resampler. For other pairs, the same filter
    is computed, with weights in double precision.
    """
    if source_rate == rate or not len(samples):
        return samples
    if not has_small_kernel(source_rate, rate):
        return _interpolated(samples, source_rate, rate)
    import torch

    with one_torch_thread():
        resampled: NDArray[np.float32] = _resampler(source_rate, rate)(torch.tensor(samples)).numpy()
    return resampled


def has_small_kernel(source_rate: int, rate: int) -> bool:
    """Returns whether torchaudio's kernel for a pair of rates has at most `_MAX_KERNEL` elements."""
    old, new = _reduced(source_rate, rate)
    return new * (old + 2 * _half_width(old, new)) <= _MAX_KERNEL


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limits torch to one thread, as in loader workers, because resampling rounds differently with several threads."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@lru_cache(maxsize=_MAX_KERNELS)
def _resampler(source_rate: int, rate: int) -> "Callable[[Tensor], Tensor]":
    """Returns torchaudio's resampler; cached, because computing its kernel takes longer than resampling a short cut."""
    from nestdata.filters import make_resampler

    return make_resampler(source_rate, rate)


def _interpolated(samples: NDArray[np.float32], source_rate: int, rate: int) -> NDArray[np.float32]:
    """Computes the filter of torchaudio's resampler at the position of each output sample."""
    old, new = _reduced(source_rate, rate)
    half, cutoff = _half_width(old, new), min(old, new) * _ROLLOFF / old
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(samples, (half, half + 1)), 2 * half + 2)
    resampled = np.empty(-(-new * len(samples) // old), np.float32)
    offsets = np.arange(-half, half + 2)
    step = max(1, _BLOCK // len(offsets))
    for first in range(0, len(resampled), step):
        # In integers, so that positions far from the start are exact. A position is between two samples.
        before, phase = np.divmod(old * np.arange(first, min(first + step, len(resampled))), new)
        times = np.clip(cutoff * (offsets - phase[:, None] / new), -_ZERO_CROSSINGS, _ZERO_CROSSINGS)
        weights = cutoff * np.sinc(times) * np.cos(times * (math.pi / 2 / _ZERO_CROSSINGS)) ** 2
        resampled[first : first + step] = np.einsum("st,st->s", windows[before], weights)
    return resampled


def _reduced(source_rate: int, rate: int) -> tuple[int, int]:
    divisor = math.gcd(source_rate, rate)
    return source_rate // divisor, rate // divisor


def _half_width(old: int, new: int) -> int:
    """Returns the number of samples on each side of a position that its filter covers."""
    return math.ceil(_ZERO_CROSSINGS * old / (min(old, new) * _ROLLOFF))
