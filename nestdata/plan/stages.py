"""The cuts of the steps of mixture stages, computed from the number of cuts that earlier stages have taken.

The cuts of a corpus in a bucket are a cell. Every cell is an endless sequence of passes over its cuts, each in a new
order. A stage decides how many cuts of each cell a step takes, and the next stage continues each cell where this one
has stopped. Therefore no cut is seen again before all others of its cell have been seen, whatever the mixtures are
and whenever they change. The number of cuts taken from a cell before any step is a sum over the stages.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from nestdata.plan.mixture import REPEATS_UNIT
from nestdata.plan.positions import Bucket
from nestdata.stateless_rng import Permutation, derive_key

# Fraction bits of the rate at which a stage takes steps from a bucket.
_RATE_BITS = 20

Cells = dict[int, range]
"""The indices of the cuts of each corpus in a bucket, by the number of the corpus."""


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive steps of an epoch, by length, whose microbatches are from the same buckets."""

    num_steps: int
    buckets: tuple[int, ...]
    """Number of the bucket of each microbatch of a step."""


class Interleaving:
    """An endless sequence of items, each in proportion to its integer weight at every point of the sequence.

    A binary tree holds the items. At each node, turns go left and right in proportion to the weights on the two sides,
    as Bresenham's algorithm divides the pixels of a line, so that the number of turns of a side is a quotient of
    integers. The item of any turn, and the number of its earlier turns, are therefore found in logarithmic time.

    Args:
        weights: Weight of each item, 0 or more, and not all 0. An item of weight 0 has no turn.
        seed: Seed of the arrangement of the tree and of the phase at each node.
        purpose: What is interleaved, as for `derive_key`.
        counters: What the sequence is for, as for `derive_key`.
    """

    def __init__(self, weights: Sequence[int], seed: int, purpose: str, *counters: int) -> None:
        self._key = seed, purpose, counters
        order = Permutation(len(weights), derive_key(seed, purpose, *counters))(np.arange(len(weights), dtype=np.int64))
        self._items: list[int] = order.tolist()
        self._leaves = {item: leaf for leaf, item in enumerate(self._items)}
        self._sums: list[int] = list(accumulate((weights[item] for item in self._items), initial=0))
        self._phases: dict[tuple[int, int], int] = {}

    def at(self, turn: int) -> tuple[int, int]:
        """Returns the item of a turn, counted from 0, and the number of its earlier turns."""
        first, end = 0, len(self._items)
        while end - first > 1:
            middle = (first + end) // 2
            left = self._left_turns(first, end, turn)
            if self._left_turns(first, end, turn + 1) > left:
                end, turn = middle, left
            else:
                first, turn = middle, turn - left
        return self._items[first], turn

    def count(self, item: int, num_turns: int) -> int:
        """Returns how many of the first `num_turns` turns an item has."""
        leaf, first, end = self._leaves[item], 0, len(self._items)
        while end - first > 1:
            middle = (first + end) // 2
            left = self._left_turns(first, end, num_turns)
            if leaf < middle:
                end, num_turns = middle, left
            else:
                first, num_turns = middle, num_turns - left
        return num_turns

    def _left_turns(self, first: int, end: int, num_turns: int) -> int:
        """Returns how many of the first turns of a node go left."""
        total = self._sums[end] - self._sums[first]
        if (first, end) not in self._phases:
            seed, purpose, counters = self._key
            self._phases[first, end] = derive_key(seed, f"{purpose} phase", *counters, first, end) % total
        share = self._sums[(first + end) // 2] - self._sums[first]
        return (num_turns * share + self._phases[first, end]) // total


class Stages:
    """The stages of a plan.

    Args:
        buckets: Buckets of the plan. Their shapes, and which cuts may be in a step together, are the same in all
            stages.
        first_indices: First index of each corpus, ascending.
        repeats: How often each cut of each corpus is seen in as many hours as all corpora have, by the first step of
            each stage, ascending.
        microbatches_per_step: Number of microbatches of a step, over all ranks.
        seed: Seed of the plan.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        first_indices: Sequence[int],
        repeats: Mapping[int, Sequence[float]],
        *,
        microbatches_per_step: int,
        seed: int,
    ) -> None:
        self._from_steps = list(repeats)
        self._buckets = buckets
        self._seed = seed
        self._before: dict[tuple[int, int, int], int] = {}
        self.cells = _cells(buckets, first_indices) if repeats else []
        """The cells of each bucket, which a plan without stages does not need."""

        sections = _sections(buckets, microbatches_per_step) if repeats else []
        self._stages = [
            _Stage(buckets, self.cells, sections, numbers, seed, from_step) for from_step, numbers in repeats.items()
        ]

    def has(self, step: int) -> bool:
        """Returns whether a step is in a stage; otherwise, it is before the first one."""
        return bool(self._from_steps) and step >= self._from_steps[0]

    def microbatch(self, step: int, microbatch: int) -> tuple[int, NDArray[np.int64]]:
        """Returns the number of the bucket of a microbatch, and the indices of its cuts, shape (cuts,)."""
        number = bisect_right(self._from_steps, step) - 1
        stage, turn = self._stages[number], step - self._from_steps[number]
        buckets = stage.buckets_of(turn)
        bucket = buckets[microbatch]
        size = self._buckets[bucket].cuts_per_microbatch
        start = size * (stage.num_microbatches(bucket, turn) + buckets[:microbatch].count(bucket))
        parts = []
        for corpus, cuts in self.cells[bucket].items():
            before = self._taken_before(number, bucket, corpus)
            first, end = (before + stage.num_taken(bucket, corpus, count) for count in (start, start + size))
            if end > first:
                parts.append(self._in_passes(cuts, first, end, bucket, corpus))
        return bucket, np.concatenate(parts)

    def num_seen_before(self, number: int, corpus: int) -> int:
        """Returns how many cuts of a corpus all stages before one take, repeated cuts included."""
        buckets = (bucket for bucket, cells in enumerate(self.cells) if corpus in cells)
        return sum(self._taken_before(number, bucket, corpus) for bucket in buckets)

    def _taken_before(self, number: int, bucket: int, corpus: int) -> int:
        """Returns how many cuts of a cell are taken before a stage."""
        key = number, bucket, corpus
        if key not in self._before:
            self._before[key] = sum(
                stage.num_taken_by_steps(bucket, corpus, end - start)
                for stage, start, end in zip(
                    self._stages, self._from_steps, self._from_steps[1 : number + 1], strict=False
                )
            )
        return self._before[key]

    def _in_passes(self, cuts: range, first: int, end: int, bucket: int, corpus: int) -> NDArray[np.int64]:
        """Returns the cuts of a cell from position `first` up to `end` of its sequence of passes."""
        passes, offsets = np.divmod(np.arange(first, end, dtype=np.int64), len(cuts))
        for one_pass in range(int(passes[0]), int(passes[-1]) + 1):
            key = derive_key(self._seed, "passes", one_pass, bucket, corpus)
            offsets[passes == one_pass] = Permutation(len(cuts), key)(offsets[passes == one_pass])
        return cuts.start + offsets


class _Stage:
    """How many cuts of each cell a stage takes, counted from its own start.

    Args:
        buckets: The buckets.
        cells: The cells of each bucket.
        sections: The steps of an epoch.
        repeats: How often each cut of each corpus is seen in an epoch.
        seed: Seed of the plan.
        from_step: First step of the stage.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        cells: Sequence[Cells],
        sections: Sequence[Section],
        repeats: Sequence[float],
        seed: int,
        from_step: int,
    ) -> None:
        self._buckets, self._sections, self._seed, self._from_step = buckets, sections, seed, from_step
        thousandths = [round(REPEATS_UNIT * number) for number in repeats]
        self._weights = [
            {corpus: len(cuts) * thousandths[corpus] for corpus, cuts in bucket.items()} for bucket in cells
        ]
        # The microbatches of a bucket without cells take the cuts of the next one that has some.
        filled = [number for number, bucket in enumerate(cells) if bucket]
        self._sources = [filled[min(bisect_left(filled, i), len(filled) - 1)] for i in range(len(buckets))]
        self._sections_of: dict[int, list[tuple[int, int]]] = {}
        for number, section in enumerate(sections):
            for bucket, count in Counter(map(self._sources.__getitem__, section.buckets)).items():
                self._sections_of.setdefault(bucket, []).append((number, count))
        # The sections from which the steps of the stage come. Those without cells have no turn.
        self._order_of_sections = Interleaving(list(map(self._rate, sections)), seed, "stage buckets", from_step)
        self._orders: dict[int, Interleaving] = {}

    def buckets_of(self, turn: int) -> list[int]:
        """Returns the number of the bucket of each microbatch of a step of the stage."""
        section, _ = self._order_of_sections.at(turn)
        return [self._sources[bucket] for bucket in self._sections[section].buckets]

    def num_microbatches(self, bucket: int, num_steps: int) -> int:
        """Returns how many microbatches of a bucket are in the first steps of the stage."""
        order = self._order_of_sections
        return sum(count * order.count(section, num_steps) for section, count in self._sections_of[bucket])

    def num_taken(self, bucket: int, corpus: int, num_cuts: int) -> int:
        """Returns how many of the first `num_cuts` cuts of a bucket are from a corpus."""
        order = self._orders.get(bucket)
        if order is None:
            weights = list(self._weights[bucket].values())
            order = self._orders[bucket] = Interleaving(weights, self._seed, "stage cuts", self._from_step, bucket)
        return order.count(list(self._weights[bucket]).index(corpus), num_cuts)

    def num_taken_by_steps(self, bucket: int, corpus: int, num_steps: int) -> int:
        """Returns how many cuts of a cell are taken in the first steps of the stage."""
        num_cuts = self.num_microbatches(bucket, num_steps) * self._buckets[bucket].cuts_per_microbatch
        return self.num_taken(bucket, corpus, num_cuts)

    def _rate(self, section: Section) -> int:
        """Returns the rate at which steps of a section show the cuts of its buckets as often as the stage wants."""
        weight, num_cuts = 0, 0
        for number, count in Counter(section.buckets).items():
            bucket = self._buckets[number]
            of_bucket = sum(self._weights[number].values()) << _RATE_BITS
            weight += of_bucket * section.num_steps * count // bucket.num_microbatches
            num_cuts += count * bucket.cuts_per_microbatch
        return max(1, weight // num_cuts) if weight else 0


def _sections(buckets: Sequence[Bucket], microbatches_per_step: int) -> list[Section]:
    """Returns the steps of an epoch."""
    sections: list[Section] = []
    begun: list[int] = []
    for number, bucket in enumerate(buckets):
        left = bucket.num_microbatches
        while left:
            if not begun and left >= microbatches_per_step:
                sections.append(Section(left // microbatches_per_step, (number,) * microbatches_per_step))
                left %= microbatches_per_step
                continue
            taken = min(left, microbatches_per_step - len(begun))
            begun += [number] * taken
            left -= taken
            if len(begun) == microbatches_per_step:
                sections.append(Section(1, tuple(begun)))
                begun = []
    return sections


def _cells(buckets: Sequence[Bucket], first_indices: Sequence[int]) -> list[Cells]:
    """Returns the cells of each bucket; together, they contain every cut exactly once.

    A cut that is repeated in an epoch may be in two neighbouring buckets. Here it belongs to the one of longer cuts.
    """
    cells: list[Cells] = []
    ends: dict[int, int] = {}
    for bucket in buckets:
        found = {}
        for cuts in bucket.cut_ranges:
            corpus = bisect_right(first_indices, cuts.first_index) - 1
            own = range(cuts.first_index, min(cuts.first_index + cuts.num_cuts, ends.get(corpus, 1 << 62)))
            ends[corpus] = own.start
            if own:
                found[corpus] = own
        cells.append(found)
    return cells
