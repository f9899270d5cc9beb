import pickle
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nestdata import BatchPlan, MixtureStage, PlanConfig, microbatches, summarise_plan
from nestdata.plan.stages import Interleaving
from tests.nestdata.plan.plans import spread_lengths

RATE = 100
Lengths = list[NDArray[np.int64]]


# Dicts instead of configurations, for which the type checks of the test run would draw random numbers.
Case = tuple[list[int], dict[str, Any]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sizes of corpora, and settings with stages."""
    sizes = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    weights = st.tuples(*[st.floats(0.01, 100.0)] * len(sizes))
    starts = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=4)))
    mixtures = st.fixed_dictionaries(
        {
            "weights": st.none() | weights,
            "temperature": st.sampled_from([1.0, 3.0]),
            "language_temperature": st.just(2.0),
        }
    )
    return sizes, {
        "max_batch_seconds": draw(st.sampled_from([50.0, 200.0])),
        "microbatches_per_step": draw(st.sampled_from([1, 2, 4])) if sum(sizes) >= 4 else 1,
        "num_shapes": draw(st.sampled_from([None, 2])),
        "weights": draw(st.none() | weights),
        "languages": tuple(draw(st.sampled_from(["en", "sw"])) for _ in sizes),
        "stages": [{"from_step": start, **draw(mixtures)} for start in starts],
        "seed": draw(st.integers(0, 2**32)),
    }


def plan_of(case: Case) -> tuple[BatchPlan, Lengths]:
    sizes, config = case
    corpora = [spread_lengths(size, 7 + number) for number, size in enumerate(sizes)]
    stages = tuple(MixtureStage(**stage) for stage in config["stages"])
    return BatchPlan(corpora, RATE, PlanConfig(**{**config, "stages": stages})), corpora


def counts_differ_by_at_most_one(counts: list[int]) -> bool:
    return max(counts) - min(counts) <= 1


@pytest.mark.slow
@given(cases())
@settings(deadline=None, max_examples=20)
def test_at_every_step_all_cuts_of_a_corpus_in_a_bucket_have_been_seen_equally_often(case: Case) -> None:
    plan, corpora = plan_of(case)
    lengths, bounds = np.concatenate(corpora), np.cumsum([0, *map(len, corpora)])
    cells = [cell for cells in plan.stages.cells for cell in cells.values()]
    assert sorted(index for cell in cells for index in cell) == list(range(len(lengths)))
    from_steps = [stage.from_step for stage in plan.config.stages]
    seen: Counter[int] = Counter()
    for step in range(from_steps[0], 60):
        for corpus, (start, end) in enumerate(pairwise(bounds)) if step in from_steps else ():
            expected = sum(seen[index] for index in range(start, end))
            assert plan.stages.num_seen_before(from_steps.index(step), corpus) == expected
        for number in range(plan.config.microbatches_per_step):
            indices = plan.indices(step, number)
            assert indices.dtype == np.int64
            assert len(indices) == plan.microbatch(step, number).bucket.cuts_per_microbatch
            assert lengths[indices].max() <= plan.microbatch(step, number).padded_samples
            assert len(indices) * plan.microbatch(step, number).padded_samples <= plan.budget.limit
            seen.update(indices.tolist())
        assert all(counts_differ_by_at_most_one([seen[index] for index in cell]) for cell in cells)


@given(cases(), st.data())
@settings(deadline=None, max_examples=5)
def test_any_number_of_ranks_and_any_interruptions_give_the_same_batches(case: Case, data: st.DataObject) -> None:
    plan, _ = plan_of(case)
    total, num_steps = plan.config.microbatches_per_step, 30
    expected = {(step, m): plan.indices(step, m).tolist() for step in range(num_steps) for m in range(total)}
    stops = sorted(data.draw(st.sets(st.integers(1, num_steps - 1), max_size=3)))
    found = {}
    for start, end in zip([0, *stops], [*stops, num_steps], strict=True):
        # Every start of the run is a new process, on another number of ranks.
        world_size = data.draw(st.sampled_from([n for n in (1, 2, 4) if total % n == 0]))
        again = pickle.loads(pickle.dumps(plan_of(case)[0]))
        for rank in range(world_size):
            for index in microbatches(again, rank=rank, world_size=world_size, start_step=start, num_steps=end - start):
                found[index] = again.indices(*index).tolist()
    assert found == expected


@pytest.mark.slow
@given(cases(), st.integers(0, 60))
@settings(deadline=None, max_examples=12)
def test_a_stage_changes_no_earlier_step(case: Case, from_step: int) -> None:
    sizes, config = case
    kept = [stage for stage in config["stages"] if stage["from_step"] < from_step]
    before, _ = plan_of((sizes, {**config, "stages": kept}))
    added = {"from_step": from_step, "weights": tuple(1.0 + number for number in range(len(sizes)))}
    after, _ = plan_of((sizes, {**config, "stages": [*kept, added]}))
    assert after.first_fingerprint == before.first_fingerprint
    assert after.fingerprint != before.fingerprint
    assert after.steps_per_epoch == before.steps_per_epoch
    for step in range(from_step):
        for number in range(config["microbatches_per_step"]):
            assert after.indices(step, number).tolist() == before.indices(step, number).tolist()


@pytest.mark.slow
def test_each_stage_has_the_shares_of_its_mixture_in_any_stretch_of_steps() -> None:
    corpora = [spread_lengths(20_000, 0), spread_lengths(5_000, 1), spread_lengths(500, 2)]
    mixtures = {0: (0.8, 0.15, 0.05), 100: (0.4, 0.3, 0.3), 250: (0.1, 0.1, 0.8)}
    stages = tuple(MixtureStage(from_step=step, weights=weights) for step, weights in mixtures.items())
    plan = BatchPlan(corpora, RATE, PlanConfig(max_batch_seconds=400.0, microbatches_per_step=4, stages=stages))
    assert plan.steps_per_epoch > 100, "the first change is within an epoch"
    lengths, bounds = np.concatenate(corpora), np.cumsum([0, *map(len, corpora)])
    for first in (0, 50, 100, 150, 200, 250, 300):
        heard = np.zeros(3)
        for index in microbatches(plan, start_step=first, num_steps=50):
            indices = plan.indices(*index)
            heard += np.bincount(np.searchsorted(bounds, indices, "right") - 1, lengths[indices], 3)
        weights = mixtures[max(step for step in mixtures if step <= first)]
        # A stretch of 50 steps does not have all 100 lengths of steps equally often.
        np.testing.assert_allclose(heard / heard.sum(), weights, atol=0.02)


def test_a_stage_shows_all_lengths_and_orders_them_by_the_seed() -> None:
    stages = (MixtureStage(from_step=0),)
    config = PlanConfig(max_batch_seconds=40.0, microbatches_per_step=2, stages=stages)
    lengths = spread_lengths(2000, 0)
    plans = [BatchPlan(lengths, RATE, replace(config, seed=seed)) for seed in (0, 1)]
    orders = [
        [plan.microbatch(*index).padded_samples for index in microbatches(plan, num_steps=plan.steps_per_epoch)]
        for plan in plans
    ]
    assert orders[0] != orders[1]
    shown = Counter(orders[0])
    for bucket in plans[0].buckets:
        assert abs(shown[bucket.padded_samples] - bucket.num_microbatches) < 12


def test_a_step_far_beyond_the_stages_is_computed_directly() -> None:
    stages = tuple(MixtureStage(from_step=10**6 * n, weights=(1.0, 1.0 + n)) for n in range(50))
    corpora = [spread_lengths(3000, 0), spread_lengths(500, 1)]
    plan = BatchPlan(corpora, RATE, PlanConfig(max_batch_seconds=400.0, stages=stages))
    indices = plan.indices(10**15, 7)
    assert len(indices) == plan.microbatch(10**15, 7).bucket.cuts_per_microbatch
    assert 0 <= indices.min() <= indices.max() < 3500


def test_batches_of_stages_are_the_same_in_every_version() -> None:
    corpora = [np.array([50, 120, 150, 200, 210, 220, 295, 300]), np.array([80, 140, 260, 290])]
    stages = (MixtureStage(from_step=1, weights=(1.0, 3.0)), MixtureStage(from_step=3, weights=(3.0, 1.0)))
    plan = BatchPlan(corpora, RATE, PlanConfig(max_batch_seconds=12.0, microbatches_per_step=2, seed=7, stages=stages))
    assert [[plan.indices(step, number).tolist() for number in range(2)] for step in range(5)] == [
        [[5, 4, 3], [8, 2, 9, 0, 1]],
        [[4, 3, 5], [0, 8, 9, 9, 8]],
        [[10, 11], [11, 10]],
        [[4, 3, 5], [1, 2, 0, 1, 9]],
        [[7, 10], [6, 11]],
    ]
    assert [plan.substitute(plan.microbatch(step, 0), 1, 0) for step in range(5)] == [5, 8, 8, 2, 6]
    assert plan.fingerprint == "c1dced3912282247abab4a71582c0274"


def test_the_summary_of_a_stage_holds_shares_and_how_often_cuts_were_seen_before() -> None:
    corpora = [spread_lengths(3000, 0), spread_lengths(500, 1)]
    stages = (MixtureStage(from_step=0, weights=(1.0, 1.0)), MixtureStage(from_step=300, weights=(9.0, 1.0)))
    plan = BatchPlan(corpora, RATE, PlanConfig(max_batch_seconds=60.0, microbatches_per_step=2, stages=stages))
    first, second = summarise_plan(plan, corpora).stages
    assert (first.from_step, second.from_step) == (0, 300)
    assert first.seen_before == (0.0, 0.0)
    seen = Counter(int(i) < 3000 for index in microbatches(plan, num_steps=300) for i in plan.indices(*index))
    assert second.seen_before == (seen[True] / 3000, seen[False] / 500)
    assert [corpus.share for corpus in second.corpora] == pytest.approx([0.9, 0.1], abs=1e-3)
    assert [corpus.repeats_per_epoch for corpus in second.corpora] == plan.stage_repeats[300]


def test_steps_before_the_first_stage_count_as_seen() -> None:
    corpora = [np.full(400, 100), np.full(100, 100)]
    config = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=2, weights=(1.0, 1.0))
    steps_per_epoch = BatchPlan(corpora, RATE, config).steps_per_epoch
    staged = replace(config, stages=(MixtureStage(from_step=2 * steps_per_epoch),))
    (stage,) = summarise_plan(BatchPlan(corpora, RATE, staged), corpora).stages
    assert stage.seen_before == (1.25, 5.0)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any), st.integers(0, 2**32))
@settings(deadline=None, max_examples=10)
def test_counts_are_those_of_all_earlier_turns_and_stay_close_to_the_weights(weights: list[int], seed: int) -> None:
    order = Interleaving(weights, seed, "test", 3)
    again = Interleaving(weights, seed, "test", 3)
    seen: Counter[int] = Counter()
    items = [item for item, weight in enumerate(weights) if weight]
    for turn in range(200):
        item, earlier = order.at(turn)
        assert earlier == seen[item]
        seen[item] += 1
        for each in items:
            assert again.count(each, turn + 1) == seen[each]
            # One turn at most is rounded away at each of the five levels of the tree.
            assert abs(seen[each] - (turn + 1) * weights[each] / sum(weights)) < 5
    assert set(seen) <= set(items)


def test_a_turn_far_away_is_found_directly() -> None:
    order = Interleaving([3, 1, 0, 4], 7, "test")
    counts = [order.count(item, 8 * 10**15) for item in (0, 1, 3)]
    assert counts == [3 * 10**15, 10**15, 4 * 10**15]
    item, earlier = order.at(8 * 10**15)
    assert earlier == counts[(0, 1, 3).index(item)]
