"""What an epoch of a plan looks like, from lengths alone: steps, padding, use of the budget, the work of each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nestdata.plan.batch_plan import BatchPlan
from nestdata.plan.layout import Bucket, Lengths, Part

_STEPS_COMPARED = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSummary:
    """Steps of one shape."""

    shortest_s: float
    longest_s: float
    """Length of its longest cut, to which all are padded."""

    cuts_per_microbatch: int
    num_steps: int
    hours: float
    """Of audio, without padding."""

    padding: float
    """Share of the samples that is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSummary:
    """What one corpus gives to an epoch."""

    num_cuts: int
    repeats_per_epoch: float
    """How often each of its cuts is seen in an epoch, on average."""

    share: float
    """Of the epoch's hours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """An epoch in numbers. Of weighted corpora, hours and padding are means over epochs; else they are exact."""

    steps_per_epoch: int
    num_positions: int
    """Cuts that an epoch shows, those that are repeated included."""

    num_repeats: int
    """Places that are filled with cuts shown elsewhere in the epoch already."""

    hours: float
    padding: float
    budget_used: float
    """Mean cost of a microbatch as a share of what it may be."""

    cost_spread: float
    """Cost of the rank that has most to do over the mean of all ranks, in the worst step; 1 where no rank waits."""

    num_shapes: int
    fingerprint: str
    corpora: tuple[CorpusSummary, ...]
    buckets: tuple[BucketSummary, ...]


def summarise_plan(plan: BatchPlan, num_samples: Sequence[Lengths], world_size: int) -> PlanSummary:
    """Adds up an epoch of a plan, at a cost that depends on neither steps nor ranks.

    Args:
        plan: Any plan.
        num_samples: Lengths of the cuts of each corpus, as the plan was made from.
        world_size: Number of ranks that share each step.

    Raises:
        ConfigError: The world size does not divide the microbatches of a step.
    """
    lengths = _Rows(num_samples, plan.min_samples)
    microbatches, rate = plan.config.microbatches_per_step, plan.sampling_rate
    slots = [bucket.num_groups * microbatches * bucket.cuts_per_microbatch for bucket in plan.buckets]
    real = [_real_samples(bucket, number, lengths) for bucket, number in zip(plan.buckets, slots, strict=True)]
    padded = [bucket.padded_samples * number for bucket, number in zip(plan.buckets, slots, strict=True)]
    costs = [bucket.cuts_per_microbatch * plan.budget.cost(bucket.padded_samples) for bucket in plan.buckets]
    groups = [bucket.num_groups for bucket in plan.buckets]
    buckets = tuple(
        BucketSummary(
            shortest_s=min(lengths.shortest(part) for part in (*bucket.parts, *bucket.fillers)) / rate,
            longest_s=bucket.padded_samples / rate,
            cuts_per_microbatch=bucket.cuts_per_microbatch,
            num_steps=bucket.num_groups,
            hours=real[i] / rate / 3600,
            padding=1 - real[i] / padded[i],
        )
        for i, bucket in enumerate(plan.buckets)
    )
    return PlanSummary(
        steps_per_epoch=plan.steps_per_epoch,
        num_positions=sum(slots),
        num_repeats=sum(slots) - sum(bucket.num_cuts for bucket in plan.buckets),
        hours=sum(real) / rate / 3600,
        padding=1 - sum(real) / sum(padded),
        budget_used=float(np.average(costs, weights=groups)) / plan.budget.limit,
        cost_spread=_cost_spread(plan, world_size),
        num_shapes=len({(bucket.cuts_per_microbatch, bucket.padded_samples) for bucket in plan.buckets}),
        fingerprint=plan.fingerprint,
        corpora=_corpora(plan, lengths),
        buckets=buckets,
    )


def draw_plan(summary: PlanSummary, path: str | Path) -> None:
    """Draws hours and padding by length, and how many cuts fill a microbatch."""
    from matplotlib.figure import Figure  # not pyplot: no global state, and no display is looked for

    figure = Figure(figsize=(9, 6.4), layout="constrained")
    hours, cuts = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
    figure.suptitle(
        f"{summary.steps_per_epoch:,} steps, {summary.hours:,.1f} h an epoch: {100 * summary.padding:.2f} % padding, "
        f"{100 * summary.budget_used:.1f} % of the budget used",
        fontsize=11,
    )
    low = np.array([bucket.shortest_s for bucket in summary.buckets])
    high = np.maximum([bucket.longest_s for bucket in summary.buckets], 1.01 * low)
    # Over a logarithmic axis, so that areas are hours.
    height = np.array([bucket.hours for bucket in summary.buckets]) / np.log2(high / low)
    padding = np.array([bucket.padding for bucket in summary.buckets])
    wasted = height * padding / (1 - padding)
    hours.bar(low, height, high - low, align="edge", color="#2f6f9f", linewidth=0, label="audio")
    hours.bar(low, wasted, high - low, bottom=height, align="edge", color="#b5532a", linewidth=0, label="padding")
    hours.set(ylabel="hours per doubling of length")
    hours.legend(frameon=False)
    counts = [bucket.cuts_per_microbatch for bucket in summary.buckets]
    cuts.hlines(counts, low, high, color="#4b4b4b", linewidth=2)
    cuts.set(ylabel="cuts in a microbatch", xlabel="length of a cut, seconds", xscale="log", yscale="log")
    for axis in (cuts.xaxis, cuts.yaxis):
        axis.set_major_formatter("{x:g}")
    for axes in (hours, cuts):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


class _Rows:
    """Lengths by row of all corpora one after the other."""

    def __init__(self, num_samples: Sequence[Lengths], min_samples: int) -> None:
        self.corpora = [lengths for lengths in num_samples if len(lengths)]
        self.first_rows = np.cumsum([0, *(len(lengths) for lengths in num_samples)])
        self._all = list(num_samples)
        self._min_samples = min_samples

    def corpus(self, part: Part) -> int:
        return int(np.searchsorted(self.first_rows, part.first_row, "right")) - 1

    def mean(self, part: Part) -> float:
        """Returns the mean length, short cuts counted as long as they are made."""
        total = 0
        lengths = self._of(part)
        for start in range(0, len(lengths), 1 << 20):
            total += int(np.maximum(lengths[start : start + (1 << 20)], self._min_samples).sum())
        return total / part.num_rows

    def shortest(self, part: Part) -> int:
        return max(int(self._of(part)[0]), self._min_samples)

    def _of(self, part: Part) -> Lengths:
        corpus = self.corpus(part)
        first = part.first_row - int(self.first_rows[corpus])
        return self._all[corpus][first : first + part.num_rows]


def _real_samples(bucket: Bucket, num_positions: int, lengths: _Rows) -> float:
    own = sum(part.num_positions * lengths.mean(part) for part in bucket.parts)
    if not bucket.fillers:
        return own
    total = sum(part.num_positions for part in bucket.fillers)
    mean = sum(part.num_positions * lengths.mean(part) for part in bucket.fillers) / total
    return own + (num_positions - bucket.num_cuts) * mean


def _cost_spread(plan: BatchPlan, world_size: int) -> float:
    """Compares what the ranks have to do, in steps from all over an epoch."""
    if world_size == 1:
        return 1.0
    shares = [plan.microbatches_of(rank, world_size) for rank in range(world_size)]
    spreads = []
    for step in np.unique(np.linspace(0, plan.steps_per_epoch - 1, _STEPS_COMPARED, dtype=np.int64)).tolist():
        cost = plan.budget.cost(plan.padded_samples(step))
        costs = [sum(len(plan.indices(step, number)) * cost for number in share) for share in shares]
        spreads.append(max(costs) * world_size / sum(costs))
    return max(spreads)


def _corpora(plan: BatchPlan, lengths: _Rows) -> tuple[CorpusSummary, ...]:
    samples = np.zeros(len(plan.repeats_per_epoch))
    for bucket in plan.buckets:
        for part in bucket.parts:
            samples[lengths.corpus(part)] += part.num_positions * lengths.mean(part)
    sizes = np.diff(lengths.first_rows)
    return tuple(
        CorpusSummary(num_cuts=int(size), repeats_per_epoch=repeats_per_epoch, share=float(share))
        for size, repeats_per_epoch, share in zip(sizes, plan.repeats_per_epoch, samples / samples.sum(), strict=True)
    )
