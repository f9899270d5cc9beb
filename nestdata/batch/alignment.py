"""Removes the delays of transforms, so that noisy audio stays aligned with clean audio that is not transformed.

The delay of a transform is measured when it is built, with bursts of noise at several positions of a quiet signal. If
all bursts are moved by the same time, this delay is removed. A transform that moves them by different times, as `Shift`
and `TimeStretch` do, is refused. The delay of an impulse response is the time of its peak, the direct sound; each file
has its own, which is removed when the file is drawn.
"""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.errors import ConfigError

# Largest shift that is ignored: the hop of the features.
_TOLERANCE_S = 0.01
_SECONDS, _BURST_SECONDS = 2.0, 0.04
_PLACES_S, _NUM_DRAWS = (0.5, 0.9, 1.4), 2
# Level of the noise before and after a burst; the level of the burst is 0.3.
_FLOOR = np.float32(0.003)
# The smallest correlation, from 0 to 1, that finds a burst; below it, the position with the most energy is taken.
_MIN_CORRELATION = 0.3
# Energy of a burst that was not silenced: more than this multiple of the median energy.
_MIN_PROMINENCE = 10.0
# Longest impulse response that is searched for its peak, in seconds.
_RESPONSE_SECONDS = 4.0


def align(transform: Any, sampling_rate: int, path: str, remedy: str) -> None:
    """Removes the delay of a transform of audiomentations; modifies the transform.

    Random numbers are drawn from the global generators.

    Args:
        transform: The transform, which must not be a composition of others.
        sampling_rate: Rate in Hz at which it will be called.
        path: Its setting, for messages.
        remedy: What to do about a transform that cannot be aligned, for messages.

    Raises:
        ConfigError: It moves speech by different times.
    """
    name = name_of(transform)
    if name == "ApplyImpulseResponse":
        _take_out(transform, _response_delays(transform, sampling_rate))
    lags = lags_of(transform, sampling_rate)
    tolerance = round(_TOLERANCE_S * sampling_rate)
    if not lags or max(map(abs, lags)) <= tolerance:
        return
    if max(lags) - min(lags) > tolerance:
        raise ConfigError(
            f"{path}: {name} moves speech by {min(lags) / sampling_rate:.2f} to {max(lags) / sampling_rate:.2f} s, so "
            f"noisy and clean audio would not be aligned. {remedy}"
        )
    delay = round(statistics.median(lags))
    _take_out(transform, lambda: delay)


def lags_of(transform: Any, sampling_rate: int) -> list[int]:
    """Returns the delay of each burst in samples, with the transform always applied; leaves out silenced bursts."""
    rng = np.random.Generator(np.random.PCG64(0))
    burst = (0.3 * rng.standard_normal(round(_BURST_SECONDS * sampling_rate))).astype(np.float32)
    lags = []
    probability, transform.p = transform.p, 1.0
    try:
        for place in _PLACES_S * _NUM_DRAWS:
            samples = _FLOOR * rng.standard_normal(round(_SECONDS * sampling_rate)).astype(np.float32)
            start = round(place * sampling_rate)
            samples[start : start + len(burst)] = burst
            changed = transform(samples=samples, sample_rate=sampling_rate)
            if changed.shape == samples.shape and np.isfinite(changed).all():
                lags += _lag(burst, changed, start)
    finally:
        transform.p = probability
    return lags


def _lag(burst: NDArray[np.float32], samples: NDArray[np.float32], start: int) -> list[int]:
    """Returns the delay in samples of a burst, which may have been filtered; an empty list if it has been silenced."""
    correlation = np.abs(np.correlate(samples, burst, "valid"))
    energy = np.convolve(np.square(samples, dtype=np.float64), np.ones(len(burst)), "valid")
    place = int(correlation.argmax())
    if correlation[place] > _MIN_CORRELATION * np.sqrt(energy[place] * np.square(burst).sum()):
        return [place - start]
    if not energy.any() or energy.max() <= _MIN_PROMINENCE * np.median(energy[energy > 0]):
        return []
    lag = int(energy.argmax()) - start
    return [0 if abs(lag) < len(burst) else lag]  # a part of the burst may have been silenced


def _response_delays(transform: Any, sampling_rate: int) -> Callable[[], int]:
    """Returns a function that returns the delay of the impulse response that was drawn last."""
    click = np.zeros(round(_RESPONSE_SECONDS * sampling_rate), np.float32)
    click[0] = 1.0
    apply, delays = transform.apply, dict[str, int]()

    def delay() -> int:
        file = transform.parameters["ir_file_path"]
        if file not in delays:
            delays[file] = int(np.abs(apply(click, sampling_rate)[: len(click)]).argmax())
        return delays[file]

    return delay


def _take_out(transform: Any, delay: Callable[[], int]) -> None:
    """Makes the output of a transform earlier by its delay in samples, or later if the delay is negative."""
    apply = transform.apply

    def aligned(samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
        lag = delay()
        changed: NDArray[np.float32] = apply(np.pad(samples, (max(0, -lag), max(0, lag))), sample_rate)
        return changed[max(0, lag) : max(0, lag) + len(samples)]

    transform.apply = aligned


def name_of(transform: Any) -> str:
    """Returns the name of a transform for messages."""
    return str(getattr(transform, "__name__", type(transform).__name__))
