from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nestdata import BatchPlan, PlanConfig, draw_plan, summarise_plan
from tests.nestdata.plan.plans import microbatches_of_epoch, spread_lengths

RATE = 100


@given(
    sizes=st.lists(st.integers(8, 120), min_size=1, max_size=3),
    quadratic=st.sampled_from([None, 10.0]),
    num_shapes=st.sampled_from([None, 2]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=8)
def test_summary_equals_the_sums_over_all_microbatches(
    sizes: list[int], quadratic: float | None, num_shapes: int | None, seed: int
) -> None:
    corpora = [spread_lengths(size, seed + i) for i, size in enumerate(sizes)]
    config = PlanConfig(
        max_batch_seconds=600.0, microbatches_per_step=4, quadratic_seconds=quadratic, num_shapes=num_shapes
    )
    plan = BatchPlan(corpora, RATE, config)
    summary = summarise_plan(plan, corpora)
    lengths = np.maximum(np.concatenate(corpora), plan.min_samples)
    epoch = [
        (plan.microbatch(*index).padded_samples, indices) for index, indices in microbatches_of_epoch(plan).items()
    ]
    shown = [index for _, indices in epoch for index in indices]
    assert summary.num_positions == len(shown)
    assert summary.num_repeats == len(shown) - len(set(shown))
    assert summary.steps_per_epoch == plan.steps_per_epoch
    assert 4 * plan.steps_per_epoch == sum(bucket.num_microbatches for bucket in summary.buckets) == len(epoch)
    assert summary.seconds_per_step == pytest.approx(3600 * summary.hours / plan.steps_per_epoch)
    shapes = [{(length, len(indices)) for length, indices in epoch[i : i + 4]} for i in range(0, len(epoch), 4)]
    assert summary.num_mixed_steps >= sum(len(step) > 1 for step in shapes)
    padded = sum(length * len(indices) for length, indices in epoch)
    # Which cuts are repeated changes with the epoch: the summary counts them with their mean length.
    tolerance = summary.num_repeats * int(lengths.max()) / padded + 1e-9
    assert summary.padding == pytest.approx(1 - lengths[shown].sum() / padded, abs=tolerance)
    assert summary.hours == pytest.approx(lengths[shown].sum() / RATE / 3600, abs=tolerance * padded / RATE / 3600)
    costs = [len(indices) * (n + (n * n // round(quadratic * RATE) if quadratic else 0)) for n, indices in epoch]
    assert summary.budget_used == pytest.approx(np.mean(costs) / (600 * RATE))
    assert summary.num_shapes == len({(length, len(indices)) for length, indices in epoch})


def test_shares_and_repeats_of_weighted_corpora_are_those_of_the_plan() -> None:
    corpora = [spread_lengths(3000, 0), spread_lengths(500, 1)]
    plan = BatchPlan(corpora, RATE, PlanConfig(max_batch_seconds=180.0, microbatches_per_step=2, weights=(1.0, 1.0)))
    summary = summarise_plan(plan, corpora)
    assert [corpus.num_cuts for corpus in summary.corpora] == [3000, 500]
    assert [corpus.repeats_per_epoch for corpus in summary.corpora] == plan.repeats_per_epoch
    # Not exactly one half: positions are whole, and short cuts are extended to one second.
    assert [corpus.share for corpus in summary.corpora] == pytest.approx([0.5, 0.5], abs=0.01)
    seen = Counter(index < 3000 for indices in microbatches_of_epoch(plan).values() for index in indices)
    assert seen[True] / 3000 == pytest.approx(plan.repeats_per_epoch[0], abs=0.01)
    assert seen[False] / 500 == pytest.approx(plan.repeats_per_epoch[1], abs=0.02)


def test_bucket_summaries_hold_lengths_counts_and_padding() -> None:
    lengths = np.array([200] * 8 + [400] * 4)
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=8.0, microbatches_per_step=2))
    long, short = summarise_plan(plan, [lengths]).buckets
    assert (long.shortest_s, long.longest_s, long.cuts_per_microbatch, long.num_microbatches) == (4, 4, 2, 2)
    assert long.padding == 0
    assert (short.shortest_s, short.longest_s, short.cuts_per_microbatch, short.num_microbatches) == (2.0, 2.0, 4, 2)
    assert short.hours == pytest.approx(16 / 3600)


def test_draw_plan_writes_a_picture(tmp_path: Path) -> None:
    lengths = spread_lengths(8, 0)
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=180.0, microbatches_per_step=4))
    draw_plan(summarise_plan(plan, [lengths]), tmp_path / "plan.png")
    with Image.open(tmp_path / "plan.png") as picture:
        assert picture.width > 900
        assert len(np.unique(np.asarray(picture.convert("L")))) > 20
