"""The shapes of an epoch: those that have to fit into memory, and those whose speed counts. No device is used."""

from collections.abc import Sequence

import numpy as np

from nestdata import BatchPlan
from nestmodel.preflight.measure.trial_step import Shape

_QUANTILES = (0.1, 0.5, 0.9)


def shapes_of(plan: BatchPlan) -> list[Shape]:
    """Returns all different shapes of an epoch, those that may need the most memory first."""
    return list(dict.fromkeys([*critical_shapes(plan), *_in_order(plan)]))


def critical_shapes(plan: BatchPlan) -> list[Shape]:
    """Returns the shapes of an epoch that may need the most memory.

    These are the shape with the most samples, that with the longest cuts, that with the largest attention matrices,
    whose size grows with the square of the length, and that with the most cuts.
    """
    shapes = _in_order(plan)
    return list(
        dict.fromkeys(
            [
                max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1])),
                max(shapes, key=lambda shape: (shape[1], shape[0])),
                max(shapes, key=lambda shape: (shape[0] * shape[1] ** 2, shape[1])),
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


def _in_order(plan: BatchPlan) -> list[Shape]:
    """Returns the shape of each bucket."""
    return [(bucket.cuts_per_microbatch, bucket.padded_samples) for bucket in plan.buckets]


def describe_shapes(shapes: Sequence[Shape], sampling_rate: int) -> str:
    """Returns the first two shapes as text, such as `12 x 20.0 s and 240 x 1.0 s ...`."""
    listed = " and ".join(f"{cuts} x {samples / sampling_rate:.1f} s" for cuts, samples in shapes[:2])
    return f"{listed} ..." if len(shapes) > 2 else listed
