"""Summary of an epoch of a plan, from lengths alone: steps, padding, use of the budget, and what stays together."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestdata.plan.batch_plan import BatchPlan
from nestdata.plan.budget import limit_text
from nestdata.plan.lengths import LengthsLike, as_lengths
from nestdata.plan.positions import Bucket, CutRange

# The longest cut of a bucket is named if the padding of the epoch, and the bucket's share of it, reach these values.
_MUCH_PADDING = 0.05
_MOST_PADDING = 0.25
# Number of steps of an epoch with the settings that are suggested for a small corpus.
_SUITABLE_STEPS = 8
# Lengths that are added up at a time, in 8 MB.
_CUTS_AT_A_TIME = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSummary:
    """The microbatches of one bucket, which have one shape."""

    shortest_s: float
    longest_s: float
    """Length of the longest cut, to which all cuts are padded."""

    cuts_per_microbatch: int
    num_microbatches: int
    hours: float
    """Hours of audio, without padding."""

    padding: float
    """Padding as a share of all samples."""

    share_of_padding: float
    """Share of the padding of the epoch that is in these microbatches."""

    longest_index: int
    """Index of a cut of the longest length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSummary:
    """The part of an epoch that comes from one corpus."""

    num_cuts: int
    repeats_per_epoch: float
    """How often each cut is seen in an epoch, on average."""

    share: float
    """Share of the epoch's hours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSummary:
    """A mixture stage."""

    from_step: int
    corpora: tuple[CorpusSummary, ...]
    """Shares of the stage's hours, and repeats in as many hours as all corpora together have."""

    seen_before: tuple[float, ...]
    """How often each cut of each corpus is seen before the stage, on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """An epoch in numbers, before the first mixture stage, and the stages.

    Hours and padding are means over epochs if the corpora are weighted, and exact otherwise. They describe the first
    epoch; in the next epochs of a small corpus, microbatches begin at other cuts, with up to 1 % more padded audio.
    """

    steps_per_epoch: int
    num_mixed_steps: int
    """Steps whose microbatches have neighbouring lengths instead of one."""

    seconds_per_step: float
    """Mean audio of a step, without padding."""

    seconds_asked: float
    """Audio of a step that `max_batch_seconds` and `microbatches_per_step` allow, padding included."""

    pairs_kept: float
    """Share of the pairs of cuts in one microbatch that are in one microbatch in the next epoch as well."""

    num_positions: int
    """Cuts that an epoch shows, repeated cuts included."""

    num_repeats: int
    """Positions that are filled with a cut that the epoch also shows elsewhere."""

    hours: float
    """Hours of audio, without padding."""

    padding: float
    """Padding as a share of all samples."""

    budget_used: float
    """Mean cost of a microbatch as a share of the budget."""

    num_shapes: int
    """Number of different batch shapes of the first epoch."""

    num_left_out: int
    """Cuts that are in no step, because no microbatch can hold them, or because they are shorter than `min_seconds`."""

    hours_left_out: float
    """Hours of audio in these cuts."""

    fingerprint: str
    """`BatchPlan.fingerprint`."""

    corpora: tuple[CorpusSummary, ...]
    buckets: tuple[BucketSummary, ...]
    stages: tuple[StageSummary, ...]


def summarise_plan(plan: BatchPlan, num_samples: LengthsLike) -> PlanSummary:
    """Returns the summary of an epoch; the time that this takes does not depend on the number of steps.

    Args:
        plan: A plan for corpora of these lengths.
        num_samples: Lengths of the cuts of each corpus, as they were given to the plan.
    """
    lengths, rate, left_out = _CutLengths(num_samples, plan), plan.sampling_rate, plan.left_out
    positions = [bucket.num_microbatches * bucket.cuts_per_microbatch for bucket in plan.buckets]
    real = [_real_samples(bucket, lengths) for bucket in plan.buckets]
    padded = [bucket.padded_samples * number for bucket, number in zip(plan.buckets, positions, strict=True)]
    costs = [
        number * plan.budget.cost(bucket.padded_samples) for bucket, number in zip(plan.buckets, positions, strict=True)
    ]
    num_microbatches = plan.steps_per_epoch * plan.config.microbatches_per_step
    buckets = tuple(
        BucketSummary(
            shortest_s=min(lengths.shortest(cuts) for cuts in (*bucket.cut_ranges, *bucket.fillers)) / rate,
            longest_s=bucket.padded_samples / rate,
            cuts_per_microbatch=bucket.cuts_per_microbatch,
            num_microbatches=bucket.num_microbatches,
            hours=real[i] / rate / 3600,
            padding=1 - real[i] / padded[i],
            share_of_padding=(padded[i] - real[i]) / max(1, sum(padded) - sum(real)),
            longest_index=lengths.longest_index((*bucket.cut_ranges, *bucket.fillers)),
        )
        for i, bucket in enumerate(plan.buckets)
    )
    return PlanSummary(
        steps_per_epoch=plan.steps_per_epoch,
        num_mixed_steps=_num_mixed_steps(plan),
        seconds_per_step=sum(real) / rate / plan.steps_per_epoch,
        seconds_asked=plan.config.max_batch_seconds * plan.config.microbatches_per_step,
        pairs_kept=_pairs_kept(plan),
        num_positions=sum(positions),
        num_repeats=sum(positions) - sum(bucket.num_cuts for bucket in plan.buckets),
        hours=sum(real) / rate / 3600,
        padding=1 - sum(real) / sum(padded),
        budget_used=sum(costs) / num_microbatches / plan.budget.limit,
        num_shapes=len({(bucket.cuts_per_microbatch, bucket.padded_samples) for bucket in plan.buckets}),
        num_left_out=left_out.num_long + left_out.num_short,
        hours_left_out=(left_out.long_samples + left_out.short_samples) / rate / 3600,
        fingerprint=plan.fingerprint,
        corpora=_corpora(plan, lengths),
        buckets=buckets,
        stages=_stages(plan, lengths),
    )


def left_out_text(plan: BatchPlan) -> str | None:
    """Returns a message about the cuts that are left out of a plan, and how to keep them; None if no cut is."""
    left_out, rate = plan.left_out, plan.sampling_rate
    texts = []
    if left_out.num_long:
        what, them = _counted(left_out.num_long, left_out.long_samples / rate)
        limit = limit_text(plan.budget.longest_of(1), rate)
        texts.append(
            f"{what}, longer than the {limit} s that a microbatch holds. To keep {them}, raise max_batch_seconds, or "
            f"prepare the corpus with --window-seconds {limit}, or --segment vad --max-segment-seconds {limit}"
        )
    if left_out.num_short:
        what, them = _counted(left_out.num_short, left_out.short_samples / rate)
        texts.append(
            f"{what}, shorter than min_seconds ({plan.config.min_seconds:g} s). To keep {them}, repeated up "
            f"to {plan.config.min_audio_seconds:g} s, set --data.plan.min-seconds 0"
        )
    return ". ".join(texts) or None


def few_steps_text(plan: BatchPlan, summary: PlanSummary) -> str | None:
    """Returns a message about a corpus of less than two steps, with settings that suit it; None if it holds more.

    Args:
        plan: The plan.
        summary: Its summary.
    """
    seconds = summary.budget_used * summary.seconds_asked * summary.steps_per_epoch
    if seconds >= 2 * summary.seconds_asked:
        return None
    per_step, budget = seconds / _SUITABLE_STEPS, plan.config.max_batch_seconds
    microbatches = max(1, int(per_step / budget))
    suitable = f"--microbatches-per-step {microbatches}"
    if per_step < budget:
        longest_s = max(bucket.longest_s for bucket in summary.buckets)
        suitable = f"--max-batch-seconds {max(math.ceil(per_step), math.ceil(longest_s))} {suitable}"
    return (
        f"the corpus holds {seconds / summary.seconds_asked:.2g} steps of the {summary.seconds_asked:,g} s that were "
        f"asked for. For about {_SUITABLE_STEPS} steps an epoch: {suitable}"
    )


def _counted(num_cuts: int, seconds: float) -> tuple[str, str]:
    duration = f"{seconds:.0f} s" if seconds < 360 else f"{seconds / 3600:,.2f} h"
    return (f"1 cut, {duration}", "it") if num_cuts == 1 else (f"{num_cuts:,} cuts, {duration}", "them")


def padding_text(summary: PlanSummary, id_of: Callable[[int], str]) -> str:
    """Returns a message about the padding of a plan; if it is much, with the cut that causes most of it.

    Args:
        summary: Result of `summarise_plan`.
        id_of: Returns the id of the cut of an index.
    """
    text = f"{100 * summary.padding:.1f} %"
    worst = max(summary.buckets, key=lambda bucket: bucket.share_of_padding)
    if summary.padding < _MUCH_PADDING or worst.share_of_padding < _MOST_PADDING:
        return text
    return (
        f"{text}; {100 * worst.share_of_padding:.0f} % of it where cuts are padded to the {worst.longest_s:.1f} s of "
        f"{id_of(worst.longest_index)!r}"
    )


def draw_plan(summary: PlanSummary, path: str | Path) -> None:
    """Draws hours and padding by cut length, and the cuts per microbatch.

    Args:
        summary: Result of `summarise_plan`.
        path: The picture; its suffix selects PNG, SVG or PDF.
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps global state and looks for a display

    figure = Figure(figsize=(6.5, 6.4), layout="constrained")
    hours, cuts = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
    figure.suptitle(
        f"{summary.steps_per_epoch:,} steps, {summary.hours:,.1f} h an epoch: {100 * summary.padding:.2f} % padding, "
        f"{100 * summary.budget_used:.1f} % of the budget used",
        fontsize=11,
    )
    low = np.array([bucket.shortest_s for bucket in summary.buckets])
    high = np.maximum([bucket.longest_s for bucket in summary.buckets], 1.01 * low)
    # Per doubling of length, so that areas are hours on the logarithmic axis.
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
    figure.savefig(path, dpi=140)


class _CutLengths:
    """Lengths of the cuts of all corpora, one corpus after the other, as the indices count them.

    Short cuts count at the length to which they are extended.
    """

    def __init__(self, num_samples: LengthsLike, plan: BatchPlan) -> None:
        corpora = as_lengths(num_samples)
        self._all = corpora[0] if len(corpora) == 1 else np.concatenate(corpora)
        self._min_samples = plan.min_samples
        self._first_indices = list(accumulate(map(len, corpora), initial=0))
        in_plan = zip(self._first_indices, plan.kept, strict=False)
        self.kept = [CutRange(first + cuts.start, cuts.stop - cuts.start, 0) for first, cuts in in_plan]
        """The cuts of each corpus that are in the plan."""

    def corpus(self, cuts: CutRange) -> int:
        """Returns the number of the corpus that cuts belong to."""
        return bisect_right(self._first_indices, cuts.first_index) - 1

    def total(self, cuts: CutRange) -> int:
        """Returns the sum of the lengths."""
        total, end = 0, cuts.first_index + cuts.num_cuts
        for start in range(cuts.first_index, end, _CUTS_AT_A_TIME):
            lengths = self._all[start : min(end, start + _CUTS_AT_A_TIME)]
            total += int(np.maximum(lengths, self._min_samples).sum())
        return total

    def of_positions(self, cut_ranges: Sequence[CutRange]) -> float:
        """Returns the sum of the lengths of the positions that cuts fill, on average over epochs."""
        return sum(cuts.num_positions * (self.total(cuts) / cuts.num_cuts) for cuts in cut_ranges)

    def longest_index(self, cut_ranges: Sequence[CutRange]) -> int:
        """Returns the index of the longest cut of several ranges."""
        longest = [cuts.first_index + cuts.num_cuts - 1 for cuts in cut_ranges]
        return max(longest, key=lambda index: int(self._all[index]))

    def shortest(self, cuts: CutRange) -> int:
        return max(int(self._all[cuts.first_index]), self._min_samples)


def _real_samples(bucket: Bucket, lengths: _CutLengths) -> float:
    """Returns the samples of a bucket without padding; for repeated cuts, the mean length of the fillers is used."""
    own = lengths.of_positions(bucket.cut_ranges)
    if not bucket.fillers:
        return own
    mean = lengths.of_positions(bucket.fillers) / sum(cuts.num_positions for cuts in bucket.fillers)
    return own + (bucket.num_microbatches * bucket.cuts_per_microbatch - bucket.num_cuts) * mean


def _num_mixed_steps(plan: BatchPlan) -> int:
    """Returns how many steps of the first epoch are not within one bucket."""
    per_step, mixed = plan.config.microbatches_per_step, set()
    for bucket in plan.buckets:
        end = bucket.first_microbatch + bucket.num_microbatches
        # Only the first and the last step of a bucket may also have microbatches of others.
        mixed |= {microbatch // per_step for microbatch in (bucket.first_microbatch, end) if microbatch % per_step}
    return len(mixed)


def _pairs_kept(plan: BatchPlan) -> float:
    """Returns the expected share of the pairs of cuts in a microbatch that are together in the next epoch as well."""
    layouts = [_spans(layout) for layout in plan.layouts]
    kept = pairs = 0.0
    for layout, following in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        pairs += sum(share * number * (number - 1) / 2 for (first, end, share) in layout if (number := end - first))
        j = 0
        for first, end, share in layout:
            while j < len(following) and following[j][0] < end:
                both = min(end, following[j][1]) - max(first, following[j][0])
                kept += share * following[j][2] * both * (both - 1) / 2
                if following[j][1] > end:
                    break
                j += 1
    return kept / pairs if pairs else 0.0


def _spans(layout: Sequence[Bucket]) -> list[tuple[int, int, float]]:
    """Returns first rank, end rank, and the share of pairs that are in one microbatch, for each bucket."""
    ends = list(accumulate(bucket.num_cuts for bucket in layout))
    return [
        (end - bucket.num_cuts, end, (bucket.cuts_per_microbatch - 1) / max(1, bucket.num_cuts - 1))
        for bucket, end in zip(layout, ends, strict=True)
    ]


def _corpora(plan: BatchPlan, lengths: _CutLengths) -> tuple[CorpusSummary, ...]:
    samples = np.zeros(len(plan.repeats_per_epoch))
    for bucket in plan.buckets:
        for cuts in bucket.cut_ranges:
            samples[lengths.corpus(cuts)] += lengths.of_positions([cuts])
    return _corpus_summaries(plan.repeats_per_epoch, samples, lengths)


def _stages(plan: BatchPlan, lengths: _CutLengths) -> tuple[StageSummary, ...]:
    if not plan.stage_repeats:
        return ()
    totals = np.array([lengths.total(cuts) for cuts in lengths.kept])
    sizes = np.array([max(1, cuts.num_cuts) for cuts in lengths.kept])
    before_stages = min(plan.stage_repeats) / plan.steps_per_epoch * np.array(plan.repeats_per_epoch)
    summaries = []
    for number, (from_step, repeats) in enumerate(plan.stage_repeats.items()):
        seen = [plan.stages.num_seen_before(number, corpus) for corpus in range(len(sizes))] / sizes + before_stages
        corpora = _corpus_summaries(repeats, np.array(repeats) * totals, lengths)
        summaries.append(StageSummary(from_step=from_step, corpora=corpora, seen_before=tuple(seen.tolist())))
    return tuple(summaries)


def _corpus_summaries(
    repeats: Sequence[float], samples: NDArray[np.float64], lengths: _CutLengths
) -> tuple[CorpusSummary, ...]:
    return tuple(
        CorpusSummary(num_cuts=cuts.num_cuts, repeats_per_epoch=repeats_per_epoch, share=float(share))
        for cuts, repeats_per_epoch, share in zip(lengths.kept, repeats, samples / samples.sum(), strict=True)
    )
