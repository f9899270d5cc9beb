"""The layouts of an epoch: buckets of cuts of similar length, longest cuts first.

The epochs of a small corpus alternate between several layouts. These differ in where microbatches begin, so that a cut
is not always in a microbatch with the same other cuts.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from nestdata.plan.budget import Budget
from nestdata.plan.packing import Ending, Packing, Run, padded_samples, sorted_runs
from nestdata.plan.positions import Bucket, Order, Positions

# A corpus with fewer microbatches than this has several layouts. In a larger corpus, most buckets have enough of them
# to separate nearly all pairs of cuts.
_SMALL = 4096
_NUM_LAYOUTS = 3
# Below this number of microbatches, padding depends much on where they begin. Then other endings are tried: the last
# microbatch may be smaller than the others, or fewer steps share the remaining work.
_TINY = 40
_ENDS = [Ending(num_steps, tenths) for num_steps in (8, 3, 2) for tenths in (10, 7, 6, 5, 4)]
# For every _MORE_STEPS steps, an epoch may have one more, so that all layouts fit into the same number of steps. With
# added steps, it has at most one step more than _MORE_WORK (a ratio) times the full steps that sorted cuts need.
_MORE_STEPS = 32
_MORE_WORK = 26, 25
# A layout has at most 1 / _MORE_PADDING more padded audio than the layout with the least.
_MORE_PADDING = 100
# Number of lengths that are considered as upper ends of fixed shapes.
_SHAPE_CANDIDATES = 256


def lay_out(
    corpora: Sequence[Positions], budget: Budget, bucket_width: float, num_shapes: int | None, *, alternates: bool
) -> list[tuple[Bucket, ...]]:
    """Returns the buckets of an epoch in one or several layouts, all of which have the same number of steps.

    Args:
        corpora: The positions of each corpus; all of them are taken into buckets.
        budget: Largest cost of a microbatch.
        bucket_width: Largest difference of the lengths in a bucket, as a share of its longest cut.
        num_shapes: Number of fixed shapes; None pads to the longest cut of each bucket.
        alternates: Whether a small corpus may have several layouts.
    """
    order = Order(corpora)
    if num_shapes:
        layouts = [_runs_of_shapes(order, budget, num_shapes)]
    else:
        layouts = _packed(order, budget, bucket_width, alternates)
    return [_buckets(order, budget, runs) for runs in layouts]


def _packed(order: Order, budget: Budget, bucket_width: float, alternates: bool) -> list[list[Run]]:
    """Returns the layouts of an epoch with little padding."""
    first = Packing(order, budget, bucket_width)
    num_microbatches = budget.microbatches * first.num_steps
    packings = [first]
    if alternates and num_microbatches < _SMALL:
        packings += [Packing(order, budget, bucket_width, shift=(i, _NUM_LAYOUTS)) for i in range(1, _NUM_LAYOUTS)]
    sorted_cuts = sorted_runs(order, budget) if num_microbatches < _SMALL else []
    work = sum(run.size * budget.cost(order.length(run.first_rank)) for run in sorted_cuts)
    num_full = work * _MORE_WORK[0] // (_MORE_WORK[1] * budget.limit * budget.microbatches)
    most = max(packing.num_steps for packing in packings)
    num_steps = min(most, first.num_steps + first.num_steps // _MORE_STEPS, max(first.num_steps, num_full + 1))
    least = padded_samples(sorted_cuts, order)
    endings, enough = _ENDS if num_microbatches < _TINY else [Ending()], least + least // _MORE_PADDING
    while (best := first.least_padded(num_steps, endings, enough)) is None:
        num_steps += 1
    others = (packing.least_padded(num_steps, endings, enough) for packing in packings[1:])
    layouts = [best, *(runs for runs in others if runs is not None)]
    least = min(padded_samples(runs, order) for runs in layouts)
    return [runs for runs in layouts if padded_samples(runs, order) <= least + least // _MORE_PADDING]


def _buckets(order: Order, budget: Budget, runs: Sequence[Run]) -> tuple[Bucket, ...]:
    firsts = accumulate((run.num_microbatches for run in runs[:-1]), initial=0)
    return tuple(
        order.bucket(budget, run.first_rank, run.size, first, run.num_microbatches)
        for run, first in zip(runs, firsts, strict=True)
    )


def _runs_of_shapes(order: Order, budget: Budget, num_shapes: int) -> list[Run]:
    """Returns runs of full microbatches in whole steps; each microbatch has one of `num_shapes` lengths."""
    edges = _shape_edges(order, budget, num_shapes)
    runs: list[Run] = []
    rank = 0
    while rank < order.num_positions:
        longest = order.length(rank)
        size = budget.num_cuts(longest)
        below = edges[bisect_left(edges, longest) - 1] if longest > edges[0] else 0
        num_steps = -(-(order.num_above(below) - rank) // (budget.microbatches * size))
        if order.num_positions < budget.microbatches * size and not runs:
            size, num_steps = -(-order.num_positions // budget.microbatches), 1
        runs.append(Run(rank, size, num_steps * budget.microbatches))
        rank = runs[-1].end
    return runs


def _shape_edges(order: Order, budget: Budget, num_shapes: int) -> list[int]:
    """Returns the upper ends of `num_shapes` length ranges, ascending, that minimise the cost of padding to them."""
    longest = order.length(0)
    edges = [longest * (i + 1) // _SHAPE_CANDIDATES for i in range(_SHAPE_CANDIDATES)]
    below = np.array(list(map(order.up_to, edges)), np.int64)
    costs = np.array(list(map(budget.cost, edges)), np.int64)
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
    return sorted({edges[i] for i in chosen})
