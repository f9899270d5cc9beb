"""The steps of a small corpus: as few as possible, with little more padding than the least that is possible.

All microbatches of a step have one shape. If a corpus has few cuts of each length, full microbatches are therefore
mostly padding, and its steps may hold fewer cuts. Dynamic programming over the sorted lengths finds the least padding
for every number of steps. All arithmetic is on integers.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestdata.plan.budget import Budget

MAX_STEPS = 1024
"""Largest number of steps of an epoch that are chosen here. A corpus that fills as many full ones is not small."""

FILLERS_PER_POSITION = 2
"""Fillers, the repeated cuts of the last step, are drawn from twice as many positions as they fill, so that no cut is
repeated in every epoch."""

# Padding of full microbatches that is no reason for smaller ones, in per cent of the audio.
_LITTLE_PADDING = 3
# A step has at least this many cuts over all microbatches, unless the budget allows fewer.
_MIN_CUTS = 8
# Number of places, apart from the ends of the longest cuts, at which a step may end.
_PLACES = 512
_IMPOSSIBLE = 1 << 61


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """The positions of an epoch, ordered by length."""

    num_positions: int
    num_samples: int
    """Samples of all positions, without padding."""

    longest_after: Callable[[int], int]
    """Returns the length of the longest position that remains when a number of them, the longest ones, are taken."""


def fewest_steps(epoch: Epoch, budget: Budget, full_samples: int) -> list[tuple[int, int]] | None:
    """Returns cuts per microbatch and padded length of each step, longest cuts first.

    Args:
        epoch: The positions.
        budget: Largest cost of a microbatch.
        full_samples: Samples of an epoch with full microbatches, padding included.

    Returns:
        None if full microbatches have little padding, or as little as others.
    """
    if full_samples - epoch.num_samples <= epoch.num_samples * _LITTLE_PADDING // 100:
        return None
    tolerated = epoch.num_samples + _tolerated_padding(epoch)
    steps = _Steps(epoch, budget)
    totals, ends = steps.solve(tolerated)
    if min(totals) > tolerated:
        tolerated = epoch.num_samples + (min(totals) - epoch.num_samples) * 11 // 10
    if full_samples <= tolerated:
        return None
    num_steps = next(number for number, total in enumerate(totals, 1) if total <= tolerated)
    found, place = [], 0
    for end in reversed(ends[:num_steps]):
        found.append(steps.shape(place, int(end[place])))
        place = int(end[place])
    return found


def _tolerated_padding(epoch: Epoch) -> int:
    """Returns the samples of padding that are tolerated for fewer steps: 1 % for each thousand cuts beyond 1,000.

    At most 3 %. Up to a thousand cuts, which are tried on a CPU, padding costs most of the time of a run. On a GPU, so
    do small microbatches, because the CPU takes as long to launch them as large ones.
    """
    return epoch.num_samples * min(max(0, epoch.num_positions - 1000), 3000) // 100_000


class _Steps:
    """The steps that are possible, from one place among the sorted positions up to another.

    Args:
        epoch: The positions.
        budget: Largest cost of a microbatch.
    """

    def __init__(self, epoch: Epoch, budget: Budget) -> None:
        # A row is one cut for each microbatch of a step. Fillers complete the last one.
        num_rows = -(-epoch.num_positions // budget.microbatches)
        num_fillers = num_rows * budget.microbatches - epoch.num_positions
        rows, longest, limits = [0], [], []
        while rows[-1] < num_rows:
            longest.append(epoch.longest_after(rows[-1] * budget.microbatches))
            limits.append(budget.num_cuts(longest[-1]))
            rows.append(min(num_rows, rows[-1] + max(1, min(num_rows // _PLACES, limits[-1]))))
        self._rows, self._longest, self._limits = rows, np.array(longest), np.array(limits)
        pool = min(epoch.num_positions, FILLERS_PER_POSITION * num_fillers)
        self._longest_filler = epoch.longest_after(epoch.num_positions - pool) if pool else 0
        self._min_rows = np.minimum(self._limits, -(-_MIN_CUTS // budget.microbatches))
        self._microbatches = budget.microbatches

    def solve(self, enough: int) -> tuple[list[int], list[NDArray[np.int64]]]:
        """Finds the least samples of an epoch, padding included, for 1, 2, ... steps.

        Args:
            enough: The search ends when the samples are at most this, or when more steps would not reduce them.

        Returns:
            The samples for each number of steps; and for each number of steps, the place where the first step ends if
            the positions from each place on are divided into that many.
        """
        costs = self._costs()
        num_places, width = costs.shape
        totals: list[int] = []
        ends: list[NDArray[np.int64]] = []
        # Least samples of all positions from each place on, in as many steps.
        rest = np.full(num_places + width, _IMPOSSIBLE)
        rest[num_places] = 0
        while len(totals) < MAX_STEPS:
            if totals and (totals[-1] <= enough or min(totals) < totals[-1]):
                break
            with_first = costs + np.lib.stride_tricks.sliding_window_view(rest[1:], width)
            best = with_first.argmin(axis=1)
            ends.append(np.arange(1, num_places + 1) + best)
            rest[:num_places] = np.minimum(with_first[np.arange(num_places), best], _IMPOSSIBLE)
            rest[num_places] = _IMPOSSIBLE
            totals.append(int(rest[0]))
        return totals, ends

    def shape(self, start: int, end: int) -> tuple[int, int]:
        """Returns cuts per microbatch and padded length of the step between two places."""
        is_last = end == len(self._longest)
        longest = max(int(self._longest[start]), self._longest_filler if is_last else 0)
        return self._rows[end] - self._rows[start], longest

    def _costs(self) -> NDArray[np.int64]:
        """Returns the samples of the steps from each place on that end at the next place, at the one after it, ...

        Steps with too many cuts or too few are `_IMPOSSIBLE`; only the last step may have too few.
        """
        num_places = len(self._longest)
        width = max(
            bisect_right(self._rows, self._rows[place] + limit) - 1 - place
            for place, limit in enumerate(self._limits.tolist())
        )
        ends = np.arange(num_places)[:, None] + np.arange(1, width + 1)
        is_last = ends == num_places
        rows = np.array(self._rows)[np.minimum(ends, num_places)] - np.array(self._rows[:-1])[:, None]
        longest = np.maximum(self._longest[:, None], np.where(is_last, self._longest_filler, 0))
        is_possible = (ends <= num_places) & (rows <= self._limits[:, None])
        is_possible &= is_last | (rows >= self._min_rows[:, None])
        return np.where(is_possible, rows * longest * self._microbatches, _IMPOSSIBLE)
