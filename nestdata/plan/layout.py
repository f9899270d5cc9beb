"""How an epoch is laid out: buckets of cuts of similar length, found by walking from the longest cut down.

Each corpus fills so many slots of an epoch, one for every view of one of its cuts. The slots of all corpora together
are ordered by length without being written down: what is needed of that order is found by bisection on the lengths.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]

# A bucket spans lengths down to 1 - 1/32 of its longest, so that padding stays under about 1.6 % on average.
_NARROW = 32
# Where that would leave a bucket with few groups, it may span 1 - 1/8 to gather four: with one group to a bucket,
# the same cuts would meet in the same step in every epoch.
_WIDE = 8
_WANTED_GROUPS = 4
# Repeats are drawn from this many times more slots than they fill, so that no cut is repeated every epoch.
_FILLERS_PER_SLOT = 4
# Lengths that are tried as fixed shapes.
_SHAPE_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Part:
    """What one corpus gives to a bucket."""

    first_row: int
    """The shortest of its cuts, as a row of all corpora one after the other."""

    num_rows: int
    num_positions: int
    """Places that these cuts fill in an epoch; as many as there are cuts unless the corpora are weighted."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Slots of similar length; every microbatch taken from it has the same shape."""

    parts: tuple[Part, ...]
    num_cuts: int
    """Slots that its parts fill."""

    fillers: tuple[Part, ...]
    """Short cuts, from which slots are filled that its own do not fill."""

    cuts_per_microbatch: int
    padded_samples: int
    """Length to which every microbatch of the bucket is padded: that of its longest cut."""

    first_group: int
    num_groups: int
    """Optimizer steps that the bucket fills in each epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What a microbatch may cost: a cut of n samples costs n + n² / quadratic_samples."""

    limit: int
    quadratic_samples: int | None
    max_cuts: int | None
    microbatches: int
    """Microbatches of an optimizer step."""

    def cost(self, num_samples: int) -> int:
        """Returns the cost of a cut, in samples of a short one."""
        return num_samples + (num_samples**2 // self.quadratic_samples if self.quadratic_samples else 0)

    def num_cuts(self, num_samples: int) -> int:
        """Returns how many cuts of a length fit into a microbatch."""
        return min(self.limit // self.cost(num_samples), self.max_cuts or self.limit)

    def longest_of(self, num_cuts: int) -> int:
        """Returns the greatest length of which so many cuts fit, 0 where so many never do."""
        if self.max_cuts and num_cuts > self.max_cuts:
            return 0
        each, q = self.limit // num_cuts, self.quadratic_samples
        if not q:
            return each
        longest = (math.isqrt(q * q + 4 * q * each) - q) // 2
        return longest + 1 if self.cost(longest + 1) <= each else longest


class Positions:
    """The slots of one corpus that are not yet in a bucket: the shortest ones, up to `end`."""

    def __init__(self, lengths: Lengths, num_positions: int, first_row: int, min_samples: int) -> None:
        self.end = num_positions
        self._lengths = lengths
        self._num_slots = num_positions
        self._first_row = first_row
        self._min_samples = min_samples

    def length(self, slot: int) -> int:
        """Returns the length of a slot: that of the longest of the cuts that it may show."""
        return max(int(self._lengths[self._rows(slot, slot + 1)[1] - 1]), self._min_samples)

    def longest(self) -> int:
        """Returns the length of the longest slot that is left, 0 where there is none."""
        return self.length(self.end - 1) if self.end else 0

    def up_to(self, num_samples: int, *, taken: bool = False) -> int:
        """Returns how many of the slots are no longer than a length, those already in a bucket left out or not."""
        if num_samples < self._min_samples:
            return 0
        row, rows, slots = (
            int(np.searchsorted(self._lengths, num_samples, "right")),
            len(self._lengths),
            self._num_slots,
        )
        # A slot counts as long as the longest of the cuts that it may show.
        slot = -(-row * slots // rows) if slots >= rows else -(-(row + 1) * slots // rows) - 1
        return min(slot, slots if taken else self.end)

    def part(self, start: int, stop: int) -> Part:
        """Returns the slots from `start` to `stop` with the cuts that they show."""
        first, last = self._rows(start, stop)
        return Part(self._first_row + first, last - first, stop - start)

    def _rows(self, start: int, stop: int) -> tuple[int, int]:
        rows, slots = len(self._lengths), self._num_slots
        return start * rows // slots, max(stop * rows // slots, (stop - 1) * rows // slots + 1)


def lay_out(corpora: Sequence[Positions], budget: Budget, num_shapes: int | None) -> list[Bucket]:
    """Lays out an epoch; each bucket is a whole number of groups, of `budget.microbatches` microbatches each."""
    edges = _shape_edges(corpora, budget, num_shapes) if num_shapes else None
    buckets: list[Bucket] = []
    while remaining := sum(slots.end for slots in corpora):
        longest = max(slots.longest() for slots in corpora)
        size = budget.num_cuts(longest)
        group = budget.microbatches * size
        if edges is None:
            num_groups = _num_groups(corpora, longest, size, budget)
        else:
            below = edges[bisect_left(edges, longest) - 1] if longest > edges[0] else 0
            num_groups = -(-(remaining - _up_to(corpora, below)) // group)
        if remaining < group and (edges is None or not buckets):
            size, num_groups = -(-remaining // budget.microbatches), 1  # what is left fills one smaller group
        num_positions = num_groups * budget.microbatches * size
        num_cuts = min(num_positions, remaining)
        fillers, longest = _fillers(corpora, num_positions - num_cuts, longest, budget.longest_of(size))
        first_group = buckets[-1].first_group + buckets[-1].num_groups if buckets else 0
        parts = _take(corpora, num_cuts)
        buckets.append(Bucket(parts, num_cuts, fillers, size, longest, first_group, num_groups))
    return buckets


def _num_groups(corpora: Sequence[Positions], longest: int, size: int, budget: Budget) -> int:
    """Returns how many groups of `size` cuts a microbatch are alike enough to be one bucket."""
    remaining, group = sum(slots.end for slots in corpora), budget.microbatches * size
    # Cuts short enough for one more to fit into a microbatch belong to another bucket.
    shortest = max(longest - longest // _NARROW, budget.longest_of(size + 1))
    alike = remaining - _up_to(corpora, shortest)
    nearly = remaining - _up_to(corpora, longest - longest // _WIDE)
    return max(1, alike // group, min(_WANTED_GROUPS, nearly // group))


def _take(corpora: Sequence[Positions], count: int) -> tuple[Part, ...]:
    """Takes the longest slots that are left; those of one length from the last corpus first."""
    if len(corpora) == 1:
        starts = [corpora[0].end - count]
    else:
        remaining = sum(slots.end for slots in corpora)
        longest = max(slots.longest() for slots in corpora)
        length = bisect_left(range(longest), True, key=lambda n: remaining - _up_to(corpora, n) <= count)
        starts = [slots.up_to(length) for slots in corpora]
        missing = count - (remaining - sum(starts))
        for i in reversed(range(len(corpora))):
            more = min(missing, starts[i] - corpora[i].up_to(length - 1))
            starts[i] -= more
            missing -= more
    parts = []
    for slots, start in zip(corpora, starts, strict=True):
        if start < slots.end:
            parts.append(slots.part(start, slots.end))
        slots.end = start
    return tuple(parts)


def _fillers(corpora: Sequence[Positions], number: int, longest: int, fitting: int) -> tuple[tuple[Part, ...], int]:
    """Returns short cuts to fill so many slots from, and the greatest length among them and those that are there."""
    if not number:
        return (), longest
    wanted = _FILLERS_PER_SLOT * number
    length = bisect_left(range(fitting), wanted, key=lambda n: sum(slots.up_to(n, taken=True) for slots in corpora))
    counts = [slots.up_to(length, taken=True) for slots in corpora]
    parts = tuple(slots.part(0, count) for slots, count in zip(corpora, counts, strict=True) if count)
    return parts, max(
        longest, *(slots.length(count - 1) for slots, count in zip(corpora, counts, strict=True) if count)
    )


def _shape_edges(corpora: Sequence[Positions], budget: Budget, num_shapes: int) -> list[int]:
    """Returns the greatest lengths of so many ranges, ascending, that waste least when all is padded to them."""
    longest = max(slots.longest() for slots in corpora)
    edges = np.array([longest * (i + 1) // _SHAPE_CANDIDATES for i in range(_SHAPE_CANDIDATES)], np.int64)
    below = np.array([_up_to(corpora, int(edge)) for edge in edges], np.int64)
    costs = np.array([budget.cost(int(edge)) for edge in edges], np.int64)
    # Cost of all slots up to an edge, when the ranges below it are divided as well as can be, by number of ranges.
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


def _up_to(corpora: Sequence[Positions], num_samples: int) -> int:
    return sum(slots.up_to(num_samples) for slots in corpora)
