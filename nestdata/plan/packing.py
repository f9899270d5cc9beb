"""Packs cuts, ordered by length, into microbatches: as much audio in each as the budget allows, with little padding.

The longest cuts come first. A microbatch takes as many as the budget allows, and neighbouring microbatches whose cuts
are of similar length are a run, within which cuts are permuted. The last steps of an epoch share the remaining work, so
that an epoch has hardly more steps than its work needs, and no step is much smaller than the others.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nestdata.plan.budget import Budget
from nestdata.plan.positions import Order

# A run of the chosen width that would have fewer microbatches may be wider, so that the same cuts are not together in
# every epoch. Over all such runs, this costs at most 1.7 % of padding.
_WANTED_MICROBATCHES = 32
_MORE_PADDING = 17, 1000
# With fewer cuts in a microbatch, one more is so much work that runs end where one more fits.
_FEW_CUTS = 32
# Largest work of a microbatch, as a multiple of the mean of the earlier microbatches of its step.
_MAX_WORK = 11, 10
# The budget of the last steps is one of _LEVELS levels. Between two levels, their microbatches change from the lower to
# the upper one in _PARTS parts. The least budget that suffices is nearly always between the percentages _GUESSED of the
# mean work.
_LEVELS = 128
_PARTS = 8
_GUESSED = 90, 104
# The last step is divided again if its last microbatch has less than this share of the mean work of the others.
_SMALL = 9, 10
# Another ending must save 1 / _LESS_PADDING of the padded audio. No step may have less than _LEAST_WORK of the mean
# work of the steps. In all steps but one, the work of each microbatch must be between _LEAST_SHARE and _MOST_SHARE of
# the mean of its step.
_LESS_PADDING = 100
_LEAST_WORK = 0.5
_LEAST_SHARE, _MOST_SHARE = 0.8, 1.15
# A shift takes a part of one microbatch from the first _NUM_SHORTENED microbatches together. Only microbatches of at
# least _MIN_SHORTENED_CUTS cuts count: with one cut less, their work is still similar to the others of their step.
_NUM_SHORTENED = 8
_MIN_SHORTENED_CUTS = 6
# The whole work of a microbatch, in tenths.
_WHOLE = 10


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring microbatches of one size."""

    first_rank: int
    """Rank of the longest of the cuts."""

    size: int
    """Cuts in a microbatch."""

    num_microbatches: int

    @property
    def end(self) -> int:
        """Rank after the last of the cuts."""
        return self.first_rank + self.size * self.num_microbatches


@dataclass(frozen=True, slots=True)
class Ending:
    """How the last steps of an epoch share the work."""

    num_steps: int = 8
    """Number of last steps that share the remaining work."""

    last_tenths: int = 10
    """Work of the last microbatch, in tenths of the work of the others."""


class Packing:
    """Packs the cuts of an epoch.

    Args:
        order: The cuts by length, longest first.
        budget: Largest cost of a microbatch.
        bucket_width: Largest difference of the lengths in a run, as a share of its longest cut.
        shift: The pair (i, n) shortens the first run by i / n of its microbatches, and the next microbatches by i / n
            of one microbatch together. With different i, all later microbatches begin at different cuts.
    """

    def __init__(self, order: Order, budget: Budget, bucket_width: float, shift: tuple[int, int] = (0, 1)) -> None:
        self._order, self._budget, self._bucket_width, self._shift = order, budget, bucket_width, shift
        self._restart([], 0)
        while self._rank < order.num_positions:
            self._add(lambda _: budget.limit, None)
        self._full = self._runs
        self.num_steps = -(-self._num_microbatches // budget.microbatches)
        """Number of steps that the microbatches need."""

    def least_padded(self, num_steps: int, endings: Sequence[Ending], enough: int) -> list[Run] | None:
        """Returns the runs of an epoch of whole steps; the last steps have similar work.

        The first ending is taken, or another one that saves padding if no step becomes small.

        Args:
            num_steps: Number of steps of the epoch.
            endings: How the last steps may share the work.
            enough: With at most this number of padded samples, no other ending is tried.

        Returns:
            None if the cuts do not fit into this number of steps.
        """
        best = self._with_ending(num_steps, endings[0])
        if best is None:
            return None
        least = padded_samples(best, self._order)
        for ending in endings[1:] if least > enough else []:
            runs = self._with_ending(num_steps, ending)
            if runs is None or not self._is_balanced(runs):
                continue
            if (padded := padded_samples(runs, self._order)) < least - least // _LESS_PADDING:
                best, least = runs, padded
        return best

    def _is_balanced(self, runs: list[Run]) -> bool:
        """Returns whether no step is small, and whether the microbatches of all steps but one have similar work."""
        sizes = [self._work(replace(run, num_microbatches=1)) for run in runs]
        works = np.repeat(np.array(sizes, np.int64), [run.num_microbatches for run in runs])
        steps = works.reshape(-1, self._budget.microbatches)
        mean = steps.mean(axis=1, keepdims=True)
        is_odd = ((steps < _LEAST_SHARE * mean) | (steps > _MOST_SHARE * mean)).any(axis=1)
        return bool(mean.min() >= _LEAST_WORK * mean.mean() and is_odd.sum() <= 1)

    def _with_ending(self, num_steps: int, ending: Ending) -> list[Run] | None:
        """Returns the runs of an epoch whose last steps share the work in one way; None if the cuts do not fit."""
        per_step = self._budget.microbatches
        end = per_step * num_steps
        runs = self._divide_again(self._full, per_step * max(0, num_steps - ending.num_steps), end, ending)
        if runs is None or ending.last_tenths < _WHOLE:
            return runs
        # One budget for all of them may leave the last microbatch small. Then its step is divided again.
        last, mean = runs[-1], self._mean_work_before(end - 1, runs[:-1])
        is_small = last.num_microbatches == 1 and self._work(last) * _SMALL[1] < mean * _SMALL[0]
        return (self._divide_again(runs, end - per_step, end, ending) if is_small else None) or runs

    def _divide_again(self, runs: list[Run], start: int, end: int, ending: Ending) -> list[Run] | None:
        """Divides the cuts from microbatch `start` on among the microbatches up to `end`, which have similar work.

        Each of them has the least budget that suffices for all cuts.

        Returns:
            None if the cuts do not fit.
        """
        kept = _first_of(runs, start)

        def fits(level: int) -> bool:
            """Packs the cuts under a budget, and returns whether they fit.

            With each level, one more part of the microbatches gets the next larger budget.
            """

            def limit(microbatch: int) -> int:
                part = (microbatch - start) * _PARTS // (end - start)
                share = self._budget.limit * ((level + part) // _PARTS) // _LEVELS
                return share * ending.last_tenths // _WHOLE if microbatch == end - 1 else share

            self._restart(kept, start)
            while self._num_microbatches < end:
                if not self._add(limit, end, keeps_last=ending.last_tenths < _WHOLE):
                    return False
            return True

        top, work = _LEVELS * _PARTS, sum(map(self._work, runs)) - sum(map(self._work, kept))
        low, high = (top * work * part // (100 * self._budget.limit * (end - start)) for part in _GUESSED)
        low, high = 0 if fits(low) else low, high if high < top and fits(high) else top
        level = bisect_left(range(high), True, low, key=fits)
        return self._runs if fits(level) else None

    def _restart(self, runs: Sequence[Run], num_microbatches: int) -> None:
        """Begins to pack behind given runs."""
        self._runs = list(runs)
        self._num_microbatches = num_microbatches
        self._num_shortened = sum(map(self._may_be_shortened, runs))
        self._shift_left = self._padded = self._added = 0

    @property
    def _rank(self) -> int:
        """Rank of the longest cut that is in no microbatch."""
        return self._runs[-1].end if self._runs else 0

    def _work(self, run: Run) -> int:
        return run.num_microbatches * run.size * self._budget.cost(self._order.length(run.first_rank))

    def _add(self, limit: Callable[[int], int], end: int | None, *, keeps_last: bool = False) -> bool:
        """Adds the run of the longest cuts that are in no microbatch.

        Args:
            limit: Largest cost of a microbatch, by its number.
            end: Number of microbatches of the epoch, which all get a cut; None for as many as are needed.
            keeps_last: Whether the last microbatch is a run of its own.

        Returns:
            False if the cuts do not fit into `end` microbatches.
        """
        first, rank = self._num_microbatches, self._rank
        remaining, longest = self._order.num_positions - rank, self._order.length(rank)
        size = min(remaining, self._size(longest, limit(first)))
        if end is not None:
            size = min(size, max(1, remaining - (end - first) + 1))
        if not size:
            return False
        number = self._num_similar(rank, size, limit(first))
        mean = self._mean_work_before(first, self._runs)
        if end is None and size * self._budget.cost(longest) * _MAX_WORK[1] > mean * _MAX_WORK[0]:
            size, number = max(1, self._size(longest, mean)), min(number, -first % self._budget.microbatches)
        if first == 0:
            number -= number * self._shift[0] // self._shift[1]
        # A run ends where the limit allows one more cut.
        number = 1 + bisect_left(range(1, number), True, key=lambda i: self._size(longest, limit(first + i)) > size)
        run = Run(rank, size, self._whole_steps(first, number))
        fitted = run if end is None else self._fitted(run, end - first, keeps_last=keeps_last)
        if fitted is None:
            return False
        self._append(self._shortened(fitted))
        return True

    def _fitted(self, run: Run, left: int, *, keeps_last: bool) -> Run | None:
        """Returns a run that leaves a cut for each later microbatch; the last run takes all cuts.

        Args:
            run: The run.
            left: Number of microbatches from its first one on.
            keeps_last: As for `_add`.

        Returns:
            None if the microbatches that are left cannot hold the cuts.
        """
        remaining = self._order.num_positions - run.first_rank
        number = min(run.num_microbatches, max(1, left - 1)) if keeps_last else run.num_microbatches
        if number >= left or number * run.size >= remaining:
            size = -(-remaining // left)
            return Run(run.first_rank, size, left) if size <= run.size else None
        if run.size > 1:
            number = max(1, min(number, (remaining - left) // (run.size - 1)))
        return replace(run, num_microbatches=number)

    def _append(self, run: Run) -> None:
        self._runs.append(run)
        self._num_microbatches += run.num_microbatches
        if run.num_microbatches <= _WANTED_MICROBATCHES:
            lengths = [self._order.length(run.first_rank + i * run.size) for i in range(run.num_microbatches)]
            self._padded += len(lengths) * run.size * lengths[0]
            self._added += sum(run.size * (lengths[0] - length) for length in lengths)

    def _shortened(self, run: Run) -> Run:
        """Returns a run without the cuts that the shift takes from it."""
        if (
            self._num_shortened == _NUM_SHORTENED
            or not self._may_be_shortened(run)
            or run.end >= self._order.num_positions
        ):
            return run
        self._num_shortened += 1
        num_left_out, self._shift_left = divmod(
            self._shift_left + run.size * self._shift[0], _NUM_SHORTENED * self._shift[1]
        )
        return replace(run, size=run.size - num_left_out)

    def _may_be_shortened(self, run: Run) -> bool:
        min_cuts = _MIN_SHORTENED_CUTS if self._budget.microbatches > 1 else 2
        return run.num_microbatches == 1 and run.size >= min_cuts

    def _size(self, longest: int, limit: int) -> int:
        """Returns the number of cuts whose cost is nearest to a limit, and within the budget."""
        cost = self._budget.cost(longest)
        return min((limit + cost // 2) // cost, self._budget.num_cuts(longest))

    def _mean_work_before(self, first: int, runs: list[Run]) -> int:
        """Returns the mean cost of the microbatches before one in its step, or the budget if it is the first.

        Args:
            first: Number of the microbatch.
            runs: The runs before it.
        """
        num_before = first % self._budget.microbatches
        work, number = 0, 0
        for run in reversed(runs):
            if number == num_before:
                break
            in_step = min(run.num_microbatches, num_before - number)
            work += self._work(replace(run, num_microbatches=in_step))
            number += in_step
        return work // num_before if num_before else self._budget.limit

    def _num_similar(self, rank: int, size: int, limit: int) -> int:
        """Returns how many microbatches of `size` cuts, from a rank on, are similar enough for one run.

        Args:
            rank: Rank of the longest of the cuts.
            size: Cuts in a microbatch.
            limit: Largest cost of the first microbatch.
        """
        order, longest = self._order, self._order.length(rank)
        wanted, shortest = rank + _WANTED_MICROBATCHES * size, longest - int(longest * self._bucket_width)
        if wanted <= order.num_positions and order.length(wanted - 1) > shortest:
            number = (order.num_above(shortest) - rank) // size
            if size >= _FEW_CUTS:
                return number
            # A run ends where one more cut fits.
            sizes = range(1, number)
            return 1 + bisect_left(sizes, True, key=lambda i: self._size(order.length(rank + i * size), limit) > size)
        number, added = 1, 0
        while number < _WANTED_MICROBATCHES and rank + number * size < order.num_positions:
            length = order.length(rank + number * size)
            added += size * (longest - length)
            allowed = (self._padded + (number + 1) * size * longest) * _MORE_PADDING[0] // _MORE_PADDING[1]
            if self._added + added > allowed or (size < _FEW_CUTS and self._size(length, limit) > size):
                break
            number += 1
        return number

    def _whole_steps(self, first: int, number: int) -> int:
        """Returns how many of `number` microbatches to take: up to the end of a step if that includes a whole step."""
        per_step = self._budget.microbatches
        rest = -first % per_step  # of the step that has begun
        return rest + (number - rest) // per_step * per_step if number >= rest + per_step else number


def sorted_runs(order: Order, budget: Budget) -> list[Run]:
    """Returns microbatches, each of as many of the longest cuts that are left as the budget allows."""
    runs: list[Run] = []
    rank = 0
    while rank < order.num_positions:
        runs.append(Run(rank, min(budget.num_cuts(order.length(rank)), order.num_positions - rank), num_microbatches=1))
        rank = runs[-1].end
    return runs


def padded_samples(runs: Sequence[Run], order: Order) -> int:
    """Returns the samples of all microbatches, each padded to its longest cut."""
    return sum(order.length(run.first_rank) * (run.end - run.first_rank) for run in runs)


def _first_of(runs: list[Run], num_microbatches: int) -> list[Run]:
    """Returns the runs of the first microbatches."""
    kept: list[Run] = []
    for run in runs:
        if not num_microbatches:
            break
        kept.append(replace(run, num_microbatches=min(run.num_microbatches, num_microbatches)))
        num_microbatches -= kept[-1].num_microbatches
    return kept
