"""The search for the largest batch budget that fits the memory, and the shapes that have to fit; no device is used."""

from collections.abc import Callable, Sequence

import numpy as np

from nestdata import BatchPlan
from nestmodel.preflight.measure.trial_step import Shape

_MAX_GROWTH = 4
"""A trial is at most this many times as large as the largest one that fits."""

_RESOLUTION = 50
"""The search ends when it is exact to one unit, or to one part in this many."""

_QUANTILES = (0.1, 0.5, 0.9)
_RATE_TOLERANCE = 0.02
"""A budget is as good as another if it processes at most this share less audio in the same time."""


def largest_fitting(
    peak_of: Callable[[int], int | None], allowed_bytes: Callable[[], int], *, start: int, lowest: int, highest: int
) -> int | None:
    """Returns the largest number in [lowest, highest] that fits, to 1 or to 2 %, if every smaller number fits as well.

    The memory of a step grows nearly linearly with the budget, so the next number is predicted from the two largest
    that fit. If a prediction gains less than bisection would, the next number is the middle of the remaining ones.

    Args:
        peak_of: Returns the peak memory in bytes of a trial, or None if it does not fit.
        allowed_bytes: Returns the memory that a trial may use; called after the first trial.
        start: The first number to try.
        lowest: The smallest number allowed.
        highest: The largest number allowed.

    Returns:
        A number that was tried and fits; None if `lowest` does not fit.
    """
    fitting: dict[int, int] = {}
    low, high = lowest - 1, highest + 1  # all up to `low` fit, `high` does not, or is not allowed
    number, was_halved = min(max(start, lowest), highest), True
    while high - low > (max(1, low // _RESOLUTION) if fitting and high <= highest else 1):
        before = high - low
        peak = peak_of(number)
        if peak is None:
            high = number
        else:
            low, fitting[number] = number, peak
        was_halved = 2 * (high - low) <= before + 1
        number = _next_number(fitting, allowed_bytes(), low, high, is_predicted=was_halved or high > highest)
    return low if low >= lowest else None


def _next_number(fitting: dict[int, int], allowed_bytes: int, low: int, high: int, *, is_predicted: bool) -> int:
    """Returns a number between `low` and `high`."""
    middle = (low + high) // 2
    if not fitting:
        return max(low + 1, min(middle, high - 1))
    number = min(middle, 2 * low)
    if is_predicted and len(fitting) > 1:
        (first, first_peak), (second, second_peak) = sorted(fitting.items())[-2:]
        if second_peak > first_peak:
            slope = (second_peak - first_peak) / (second - first)
            number = second + int((allowed_bytes - second_peak) / slope)
        number = min(number, _MAX_GROWTH * low)
    return max(low + 1, min(number, high - 1))


def best_budget(rates: dict[float, float]) -> float:
    """Returns the smallest budget that processes about as much audio a second as the fastest one.

    Args:
        rates: Audio-seconds a second by budget in seconds.
    """
    fastest = max(rates.values())
    return min(budget for budget, rate in rates.items() if rate >= (1 - _RATE_TOLERANCE) * fastest)


def shapes_of(plan: BatchPlan) -> list[Shape]:
    """Returns all different shapes of an epoch, those that may need the most memory first."""
    shapes = [(bucket.cuts_per_microbatch, bucket.padded_samples) for bucket in plan.buckets]
    return list(dict.fromkeys([*critical_shapes(plan), *shapes]))


def critical_shapes(plan: BatchPlan) -> list[Shape]:
    """Returns the shapes of an epoch that may need the most memory.

    These are the shape with the most samples, that with the largest attention matrices, whose size grows with the
    square of the length, that with the longest cuts, and that with the most cuts.
    """
    shapes = [(bucket.cuts_per_microbatch, bucket.padded_samples) for bucket in plan.buckets]
    return list(
        dict.fromkeys(
            [
                max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1])),
                max(shapes, key=lambda shape: (shape[0] * shape[1] ** 2, shape[1])),
                max(shapes, key=lambda shape: (shape[1], shape[0])),
                max(shapes, key=lambda shape: (shape[0], shape[1])),
            ]
        )
    )


def typical_shapes(plan: BatchPlan) -> list[Shape]:
    """Returns the shapes below which 10 %, 50 % and 90 % of the audio of an epoch lie, ordered by length."""
    buckets = sorted(plan.buckets, key=lambda bucket: bucket.padded_samples)
    audio = np.cumsum([bucket.num_groups * bucket.cuts_per_microbatch * bucket.padded_samples for bucket in buckets])
    numbers = np.searchsorted(audio, [share * audio[-1] for share in _QUANTILES])
    chosen = [buckets[int(number)] for number in numbers]
    return list(dict.fromkeys((bucket.cuts_per_microbatch, bucket.padded_samples) for bucket in chosen))


def describe_shapes(shapes: Sequence[Shape], sampling_rate: int) -> str:
    """Returns shapes as text, such as `12 x 20.0 s and 240 x 1.0 s`."""
    return " and ".join(f"{cuts} x {samples / sampling_rate:.1f} s" for cuts, samples in shapes)
