"""Lengths of corpora, and what an epoch of a plan holds."""

import numpy as np
from numpy.typing import NDArray

from nestdata import BatchPlan


def spread_lengths(number: int, seed: int) -> NDArray[np.int64]:
    """Returns log-normal lengths in ascending order."""
    lengths = np.random.default_rng(seed).lognormal(np.log(900), 0.6, number).clip(100, 4000)
    return np.sort(lengths).astype(np.int64)


def microbatches_of_epoch(plan: BatchPlan, epoch: int = 0) -> dict[tuple[int, int], list[int]]:
    """Returns the indices of every (step, microbatch) of one epoch."""
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    keys = [(step, number) for step in steps for number in range(plan.config.microbatches_per_step)]
    return {key: plan.indices(*key).tolist() for key in keys}
