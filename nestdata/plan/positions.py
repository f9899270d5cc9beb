"""The positions of an epoch, ordered by length, and the buckets that they fill.

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
    """The positions of one corpus, ordered by length, the shortest one first.

    Args:
        lengths: Lengths of the cuts in samples, ascending.
        num_positions: Positions that the corpus fills in an epoch.
        first_index: Index of the shortest cut, counted over all corpora.
        min_samples: Length to which shorter cuts are extended.
    """

    def __init__(self, lengths: Lengths, num_positions: int, first_index: int, min_samples: int) -> None:
        self.num_positions = num_positions
        self._lengths = lengths
        self._first_index = first_index
        self._min_samples = min_samples

    def length(self, position: int) -> int:
        """Returns the length of a position, which is the length of the longest cut that it may show."""
        return max(int(self._lengths[self._cuts(position, position + 1)[1] - 1]), self._min_samples)

    def up_to(self, num_samples: int) -> int:
        """Returns how many positions are at most `num_samples` long."""
        if num_samples < self._min_samples:
            return 0
        num_short_cuts = int(np.searchsorted(self._lengths, num_samples, "right"))
        num_cuts, num_positions = len(self._lengths), self.num_positions
        # A position is as long as the longest cut that it may show.
        if num_positions >= num_cuts:
            count = -(-num_short_cuts * num_positions // num_cuts)
        else:
            count = -(-(num_short_cuts + 1) * num_positions // num_cuts) - 1
        return min(count, num_positions)

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
    """The positions of all corpora by length: rank 0 is the longest one. Of equal ones, the last corpus comes first."""

    def __init__(self, corpora: Sequence[Positions]) -> None:
        self._corpora = corpora
        self.num_positions = sum(positions.num_positions for positions in corpora)
        self._longest = max(positions.length(positions.num_positions - 1) for positions in corpora)
        self._lengths: dict[int, int] = {}

    def num_above(self, num_samples: int) -> int:
        """Returns how many positions are longer than `num_samples`."""
        return self.num_positions - self.up_to(num_samples)

    def up_to(self, num_samples: int) -> int:
        """Returns how many positions are at most `num_samples` long."""
        return sum(positions.up_to(num_samples) for positions in self._corpora)

    def length(self, rank: int) -> int:
        """Returns the length of the position of a rank."""
        if rank not in self._lengths:
            if len(self._corpora) == 1:
                length = self._corpora[0].length(self.num_positions - 1 - rank)
            else:
                length = bisect_left(range(self._longest), True, key=lambda n: self.num_above(n) <= rank)
            self._lengths[rank] = length
        return self._lengths[rank]

    def bucket(
        self, budget: Budget, first_rank: int, size: int, first_microbatch: int, num_microbatches: int
    ) -> Bucket:
        """Returns the bucket of the positions from a rank on.

        Args:
            budget: Largest cost of a microbatch.
            first_rank: Rank of its longest position.
            size: Cuts per microbatch.
            first_microbatch: Number of its first microbatch.
            num_microbatches: Number of microbatches; in the last bucket, they may have more positions than remain.
        """
        longest, end = self.length(first_rank), first_rank + num_microbatches * size
        num_cuts = min(end, self.num_positions) - first_rank
        own = zip(self._corpora, self._num_behind(first_rank + num_cuts), self._num_behind(first_rank), strict=True)
        cut_ranges = tuple(each.cut_range(start, stop) for each, start, stop in own if start < stop)
        fillers: tuple[CutRange, ...] = ()
        if num_empty := end - first_rank - num_cuts:
            # The shortest positions, and at least some that fit into the microbatches.
            wanted = _FILLERS_PER_POSITION * num_empty
            length = bisect_left(range(budget.longest_of(size)), wanted, key=self.up_to)
            short = [(each, number) for each in self._corpora if (number := each.up_to(length))]
            fillers = tuple(each.cut_range(0, number) for each, number in short)
            longest = max([longest, *(each.length(number - 1) for each, number in short)])
        return Bucket(cut_ranges, num_cuts, fillers, size, longest, first_microbatch, num_microbatches)

    def _num_behind(self, rank: int) -> list[int]:
        """Returns how many positions of each corpus have this rank or a higher one; they are its shortest ones."""
        num_behind = self.num_positions - rank
        if len(self._corpora) == 1 or not num_behind:
            return [num_behind] * len(self._corpora)
        length = self.length(rank)
        numbers = [positions.up_to(length) for positions in self._corpora]
        excess = sum(numbers) - num_behind
        for i in reversed(range(len(numbers))):
            before = min(excess, numbers[i] - self._corpora[i].up_to(length - 1))
            numbers[i] -= before
            excess -= before
        return numbers
