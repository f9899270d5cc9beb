"""The layout of an epoch: buckets of cuts of similar length, built from the longest cut down.

Every corpus fills a number of positions of an epoch; a cut that is shown twice in an epoch fills two. The positions of
all corpora are ordered by length, but that order is never materialised: the counts that are needed are found by binary
search in the lengths. A group is all microbatches of one optimizer step.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from nestdata.plan.budget import Budget
from nestdata.plan.least_padding import FILLERS_PER_POSITION, MAX_STEPS, Epoch, fewest_steps
from nestdata.plan.lengths import Lengths

# If a bucket of the chosen width would have fewer than four groups, it may span lengths down to 7/8 to reach four. With
# one group per bucket, the same cuts would be in the same step in every epoch.
_WIDE = 8
_WANTED_GROUPS = 4
# Number of lengths that are considered as upper ends of fixed shapes.
_SHAPE_CANDIDATES = 256
# Lengths that are read at a time; all of them may not fit into memory.
_READ_AT_A_TIME = 1 << 20


@dataclass(frozen=True, slots=True)
class CutRange:
    """Consecutive cuts of one corpus, ordered by length, and the positions that they fill."""

    first_index: int
    """Index of the shortest of the cuts. Indices run over all corpora, one after the other."""

    num_cuts: int
    num_positions: int
    """Positions that the cuts fill in an epoch: the number of cuts, unless the corpora are weighted."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Positions of similar length. All microbatches of a bucket have the same shape."""

    cut_ranges: tuple[CutRange, ...]
    num_cuts: int
    """Positions that the cut ranges fill."""

    fillers: tuple[CutRange, ...]
    """Short cuts that are repeated in the positions that the bucket's own cuts leave empty."""

    cuts_per_microbatch: int
    padded_samples: int
    """Length to which every microbatch of the bucket is padded: that of its longest cut."""

    first_group: int
    num_groups: int
    """Optimizer steps that the bucket fills in each epoch."""


class Positions:
    """The positions of one corpus, ordered by length. Those below `end`, the shortest ones, are not yet in a bucket.

    Args:
        lengths: Lengths of the cuts in samples, ascending.
        num_positions: Positions that the corpus fills in an epoch.
        first_index: Index of the shortest cut, counted over all corpora.
        min_samples: Length to which shorter cuts are extended.
    """

    def __init__(self, lengths: Lengths, num_positions: int, first_index: int, min_samples: int) -> None:
        self.end = num_positions
        self._lengths = lengths
        self._num_positions = num_positions
        self._first_index = first_index
        self._min_samples = min_samples

    def restore(self) -> None:
        """Puts all positions back."""
        self.end = self._num_positions

    def num_samples(self) -> int:
        """Returns the samples of all positions, without padding. A cut counts as often as it is shown, on average."""
        num_samples = sum(
            int(np.maximum(self._lengths[start : start + _READ_AT_A_TIME], self._min_samples).sum())
            for start in range(0, len(self._lengths), _READ_AT_A_TIME)
        )
        return num_samples * self._num_positions // len(self._lengths)

    def length(self, position: int) -> int:
        """Returns the length of a position: that of the longest cut that it may show."""
        return max(int(self._lengths[self._cuts(position, position + 1)[1] - 1]), self._min_samples)

    def longest(self) -> int:
        """Returns the length of the longest position that is not in a bucket, or 0 if none is left."""
        return self.length(self.end - 1) if self.end else 0

    def up_to(self, num_samples: int, *, taken: bool = False) -> int:
        """Returns how many positions are at most `num_samples` long.

        Args:
            num_samples: The length.
            taken: Whether positions that are in a bucket already are counted as well.
        """
        if num_samples < self._min_samples:
            return 0
        num_short_cuts = int(np.searchsorted(self._lengths, num_samples, "right"))
        num_cuts, num_positions = len(self._lengths), self._num_positions
        # A position is as long as the longest cut that it may show.
        if num_positions >= num_cuts:
            count = -(-num_short_cuts * num_positions // num_cuts)
        else:
            count = -(-(num_short_cuts + 1) * num_positions // num_cuts) - 1
        return min(count, num_positions if taken else self.end)

    def cut_range(self, start: int, stop: int) -> CutRange:
        """Returns the cuts that the positions from `start` up to `stop` show."""
        first, last = self._cuts(start, stop)
        return CutRange(self._first_index + first, last - first, stop - start)

    def _cuts(self, start: int, stop: int) -> tuple[int, int]:
        num_cuts, num_positions = len(self._lengths), self._num_positions
        return start * num_cuts // num_positions, max(
            stop * num_cuts // num_positions, (stop - 1) * num_cuts // num_positions + 1
        )


def lay_out(corpora: Sequence[Positions], budget: Budget, bucket_width: float, num_shapes: int | None) -> list[Bucket]:
    """Returns the buckets of an epoch, longest cuts first; the positions are taken.

    Every bucket is a whole number of groups of `budget.microbatches` microbatches each.

    Args:
        corpora: The positions of each corpus.
        budget: Largest cost of a microbatch.
        bucket_width: Largest difference of the lengths in a bucket, as a share of its longest cut.
        num_shapes: Number of fixed shapes; None pads to the longest cut of each bucket.
    """
    if num_shapes:
        return _with_shapes(corpora, budget, num_shapes)
    buckets = _full(corpora, budget, bucket_width)
    if buckets[-1].first_group + buckets[-1].num_groups >= MAX_STEPS:
        return buckets
    for positions in corpora:
        positions.restore()
    epoch = Epoch(
        num_positions=_num_remaining(corpora),
        num_samples=sum(positions.num_samples() for positions in corpora),
        longest_after=partial(_longest_after, corpora),
    )
    full = sum(bucket.num_groups * bucket.cuts_per_microbatch * bucket.padded_samples for bucket in buckets)
    steps = fewest_steps(epoch, budget, full * budget.microbatches)
    return buckets if steps is None else _with_steps(corpora, budget, steps)


def _full(corpora: Sequence[Positions], budget: Budget, bucket_width: float) -> list[Bucket]:
    """Returns buckets of microbatches that have as many cuts as the budget allows."""
    buckets: list[Bucket] = []
    while remaining := _num_remaining(corpora):
        longest = max(positions.longest() for positions in corpora)
        size = budget.num_cuts(longest)
        num_groups = _num_groups(corpora, longest, size, budget, bucket_width)
        if remaining < budget.microbatches * size:
            size, num_groups = -(-remaining // budget.microbatches), 1  # the last positions fill one smaller group
        buckets.append(_take_bucket(corpora, budget, buckets, size, num_groups))
    return buckets


def _with_shapes(corpora: Sequence[Positions], budget: Budget, num_shapes: int) -> list[Bucket]:
    """Returns buckets of full microbatches, each of which has one of `num_shapes` lengths."""
    edges = _shape_edges(corpora, budget, num_shapes)
    buckets: list[Bucket] = []
    while remaining := _num_remaining(corpora):
        longest = max(positions.longest() for positions in corpora)
        size = budget.num_cuts(longest)
        below = edges[bisect_left(edges, longest) - 1] if longest > edges[0] else 0
        num_groups = -(-(remaining - _up_to(corpora, below)) // (budget.microbatches * size))
        if remaining < budget.microbatches * size and not buckets:
            size, num_groups = -(-remaining // budget.microbatches), 1
        buckets.append(_take_bucket(corpora, budget, buckets, size, num_groups))
    return buckets


def _with_steps(corpora: Sequence[Positions], budget: Budget, steps: Sequence[tuple[int, int]]) -> list[Bucket]:
    """Returns buckets of the given steps: cuts per microbatch and length of each, longest cuts first."""
    buckets: list[Bucket] = []
    for (size, _), equal_steps in groupby(steps):
        buckets.append(_take_bucket(corpora, budget, buckets, size, len(list(equal_steps))))
    return buckets


def _take_bucket(
    corpora: Sequence[Positions], budget: Budget, buckets: Sequence[Bucket], size: int, num_groups: int
) -> Bucket:
    """Takes the longest remaining positions for the bucket that follows `buckets`.

    Args:
        corpora: The positions of each corpus.
        budget: Largest cost of a microbatch.
        buckets: The buckets before this one.
        size: Cuts per microbatch.
        num_groups: Number of groups; those of the last bucket may have more positions than remain.
    """
    remaining, longest = _num_remaining(corpora), max(positions.longest() for positions in corpora)
    num_positions = num_groups * budget.microbatches * size
    num_cuts = min(num_positions, remaining)
    fillers, longest = _fillers(corpora, num_positions - num_cuts, longest, budget.longest_of(size))
    first_group = buckets[-1].first_group + buckets[-1].num_groups if buckets else 0
    return Bucket(_take(corpora, num_cuts), num_cuts, fillers, size, longest, first_group, num_groups)


def _num_groups(corpora: Sequence[Positions], longest: int, size: int, budget: Budget, bucket_width: float) -> int:
    """Returns the number of groups, of `size` cuts per microbatch, whose cuts are similar enough for one bucket."""
    remaining, group = _num_remaining(corpora), budget.microbatches * size
    # Cuts that are so short that one more fits into a microbatch belong to another bucket.
    shortest = max(longest - math.floor(longest * bucket_width), budget.longest_of(size + 1))
    num_narrow = remaining - _up_to(corpora, shortest)
    num_wide = remaining - _up_to(corpora, longest - longest // _WIDE)
    return max(1, num_narrow // group, min(_WANTED_GROUPS, num_wide // group))


def _take(corpora: Sequence[Positions], count: int) -> tuple[CutRange, ...]:
    """Takes the `count` longest remaining positions; among equal lengths, those of the last corpus first."""
    if len(corpora) == 1:
        starts = [corpora[0].end - count]
    else:
        remaining, length = _num_remaining(corpora), _longest_after(corpora, count)
        starts = [positions.up_to(length) for positions in corpora]
        missing = count - (remaining - sum(starts))
        for i in reversed(range(len(corpora))):
            more = min(missing, starts[i] - corpora[i].up_to(length - 1))
            starts[i] -= more
            missing -= more
    cut_ranges = []
    for positions, start in zip(corpora, starts, strict=True):
        if start < positions.end:
            cut_ranges.append(positions.cut_range(start, positions.end))
        positions.end = start
    return tuple(cut_ranges)


def _fillers(
    corpora: Sequence[Positions], count: int, longest: int, max_length: int
) -> tuple[tuple[CutRange, ...], int]:
    """Chooses short cuts that can fill `count` empty positions.

    Args:
        corpora: The positions of each corpus.
        count: Number of positions to fill.
        longest: Length of the longest cut of the bucket.
        max_length: Greatest length that fits into the microbatches of the bucket.

    Returns:
        The cuts, and the greatest length among them and `longest`.
    """
    if not count:
        return (), longest
    wanted = FILLERS_PER_POSITION * count
    length = bisect_left(
        range(max_length), wanted, key=lambda n: sum(positions.up_to(n, taken=True) for positions in corpora)
    )
    counts = [positions.up_to(length, taken=True) for positions in corpora]
    chosen = [(positions, number) for positions, number in zip(corpora, counts, strict=True) if number]
    cut_ranges = tuple(positions.cut_range(0, number) for positions, number in chosen)
    return cut_ranges, max(longest, *(positions.length(number - 1) for positions, number in chosen))


def _shape_edges(corpora: Sequence[Positions], budget: Budget, num_shapes: int) -> list[int]:
    """Returns the upper ends of `num_shapes` length ranges, ascending, that minimise the cost of padding to them."""
    longest = max(positions.longest() for positions in corpora)
    edges = np.array([longest * (i + 1) // _SHAPE_CANDIDATES for i in range(_SHAPE_CANDIDATES)], np.int64)
    below = np.array([_up_to(corpora, int(edge)) for edge in edges], np.int64)
    costs = np.array([budget.cost(int(edge)) for edge in edges], np.int64)
    # Dynamic programming: least cost of all positions up to each edge, by number of ranges.
    best = below * costs
    choices: list[NDArray[np.int64]] = []
    for _ in range(num_shapes - 1):
        total = best[:, None] + (below[None, :] - below[:, None]) * costs[None, :]
        total[np.tril_indices(len(edges), -1)] = np.iinfo(np.int64).max
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    chosen = [len(edges) - 1]
    for choice in reversed(choices):
        chosen.append(int(choice[chosen[-1]]))
    return sorted({int(edges[i]) for i in chosen})


def _longest_after(corpora: Sequence[Positions], count: int) -> int:
    """Returns the length of the longest position that remains after the `count` longest ones are taken."""
    if len(corpora) == 1:
        return corpora[0].length(corpora[0].end - count - 1)
    remaining, longest = _num_remaining(corpora), max(positions.longest() for positions in corpora)
    return bisect_left(range(longest), True, key=lambda n: remaining - _up_to(corpora, n) <= count)


def _up_to(corpora: Sequence[Positions], num_samples: int) -> int:
    return sum(positions.up_to(num_samples) for positions in corpora)


def _num_remaining(corpora: Sequence[Positions]) -> int:
    return sum(positions.end for positions in corpora)
