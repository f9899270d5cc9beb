"""The positions of an epoch, ordered by length, and how they are taken into buckets, longest cuts first.

Every corpus fills a number of positions of an epoch; a cut that is shown twice in an epoch fills two. The positions of
all corpora are ordered by length, but that order is never materialised: the counts that are needed are found by binary
search in the lengths.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nestdata.plan.budget import Budget
from nestdata.plan.lengths import Lengths

# Fillers, the repeated cuts of the last microbatches, are drawn from twice as many positions as they fill, so that no
# cut is repeated in every epoch.
_FILLERS_PER_POSITION = 2


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
    """Positions of similar length, which fill whole microbatches of one shape."""

    cut_ranges: tuple[CutRange, ...]
    num_cuts: int
    """Positions that the cut ranges fill."""

    fillers: tuple[CutRange, ...]
    """Short cuts that are repeated in the positions that the bucket's own cuts leave empty."""

    cuts_per_microbatch: int
    padded_samples: int
    """Length to which every microbatch of the bucket is padded: the length of the longest cut in the bucket."""

    first_microbatch: int
    """Number of its first microbatch. The microbatches of an epoch are counted from the longest cuts on."""

    num_microbatches: int


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
        self.num_positions = num_positions
        self._first_index = first_index
        self._min_samples = min_samples

    def restore(self) -> None:
        """Takes all positions out of their buckets."""
        self.end = self.num_positions

    def length(self, position: int) -> int:
        """Returns the length of a position, which is the length of the longest cut that it may show."""
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
        num_cuts, num_positions = len(self._lengths), self.num_positions
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
        num_cuts, num_positions = len(self._lengths), self.num_positions
        return start * num_cuts // num_positions, max(
            stop * num_cuts // num_positions, (stop - 1) * num_cuts // num_positions + 1
        )


class Order:
    """All positions, ordered by length, whether they are in a bucket or not. The longest one has rank 0."""

    def __init__(self, corpora: Sequence[Positions]) -> None:
        self._corpora = corpora
        self.num_cuts = sum(positions.num_positions for positions in corpora)
        self._longest = max(positions.length(positions.num_positions - 1) for positions in corpora)
        self._lengths: dict[int, int] = {}

    def num_above(self, num_samples: int) -> int:
        """Returns how many positions are longer than `num_samples`."""
        return self.num_cuts - sum(positions.up_to(num_samples, taken=True) for positions in self._corpora)

    def length(self, rank: int) -> int:
        """Returns the length of the position of a rank."""
        if rank not in self._lengths:
            if len(self._corpora) == 1:
                length = self._corpora[0].length(self.num_cuts - 1 - rank)
            else:
                length = bisect_left(range(self._longest), True, key=lambda n: self.num_above(n) <= rank)
            self._lengths[rank] = length
        return self._lengths[rank]


def take_bucket(
    corpora: Sequence[Positions], budget: Budget, buckets: Sequence[Bucket], size: int, num_microbatches: int
) -> Bucket:
    """Takes the longest remaining positions for a bucket.

    Args:
        corpora: The positions of each corpus.
        budget: Largest cost of a microbatch.
        buckets: The buckets before this one.
        size: Cuts per microbatch.
        num_microbatches: Number of microbatches; in the last bucket, they may have more positions than remain.
    """
    remaining, longest = num_remaining(corpora), longest_remaining(corpora)
    num_positions = num_microbatches * size
    num_cuts = min(num_positions, remaining)
    fillers, longest = _fillers(corpora, num_positions - num_cuts, longest, budget.longest_of(size))
    first = buckets[-1].first_microbatch + buckets[-1].num_microbatches if buckets else 0
    return Bucket(_take(corpora, num_cuts), num_cuts, fillers, size, longest, first, num_microbatches)


def longest_after(corpora: Sequence[Positions], count: int) -> int:
    """Returns the length of the longest position that remains after the `count` longest ones are taken."""
    if len(corpora) == 1:
        return corpora[0].length(corpora[0].end - count - 1)
    remaining, longest = num_remaining(corpora), longest_remaining(corpora)
    return bisect_left(range(longest), True, key=lambda n: remaining - up_to(corpora, n) <= count)


def longest_remaining(corpora: Sequence[Positions]) -> int:
    """Returns the length of the longest remaining position, or 0 if none is left."""
    return max(positions.longest() for positions in corpora)


def up_to(corpora: Sequence[Positions], num_samples: int) -> int:
    """Returns how many of the remaining positions are at most `num_samples` long."""
    return sum(positions.up_to(num_samples) for positions in corpora)


def num_remaining(corpora: Sequence[Positions]) -> int:
    """Returns how many positions are in no bucket."""
    return sum(positions.end for positions in corpora)


def _take(corpora: Sequence[Positions], count: int) -> tuple[CutRange, ...]:
    """Takes the `count` longest remaining positions; among equal lengths, the last corpus comes first."""
    if len(corpora) == 1:
        starts = [corpora[0].end - count]
    else:
        remaining, length = num_remaining(corpora), longest_after(corpora, count)
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
    wanted = _FILLERS_PER_POSITION * count
    length = bisect_left(
        range(max_length), wanted, key=lambda n: sum(positions.up_to(n, taken=True) for positions in corpora)
    )
    counts = [positions.up_to(length, taken=True) for positions in corpora]
    chosen = [(positions, number) for positions, number in zip(corpora, counts, strict=True) if number]
    cut_ranges = tuple(positions.cut_range(0, number) for positions, number in chosen)
    return cut_ranges, max(longest, *(positions.length(number - 1) for positions, number in chosen))
