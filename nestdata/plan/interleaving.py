"""Interleaving: a fixed order in which items take turns, each as often as its weight says, counted in closed form."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from nestdata.stateless_rng import Permutation, derive_key


class Interleaving:
    """An endless sequence of items, each in proportion to its integer weight at every point of the sequence.

    A binary tree holds the items. At each node, turns go left and right in proportion to the weights on the two sides,
    as Bresenham's algorithm divides the pixels of a line, so that the number of turns of a side is a quotient of
    integers. An item, and how often it was there before, are therefore found in logarithmic time for any turn.

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
        """Returns how many of the first `num_turns` turns are those of an item."""
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
        """Returns how many of the first turns of a node are those of its left side."""
        total = self._sums[end] - self._sums[first]
        if (first, end) not in self._phases:
            seed, purpose, counters = self._key
            self._phases[first, end] = derive_key(seed, f"{purpose} phase", *counters, first, end) % total
        share = self._sums[(first + end) // 2] - self._sums[first]
        return (num_turns * share + self._phases[first, end]) // total
