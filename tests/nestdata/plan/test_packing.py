"""What a step holds, judged from the indices of a plan: full steps, equal work, little padding, other partners."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nestdata import BatchPlan, PlanConfig, summarise_plan
from nestdata.plan.summary import few_steps_text, left_out_text

RATE = 16000
Seconds = NDArray[np.float64]


def samples(seconds: Seconds) -> NDArray[np.int64]:
    return np.sort(seconds * RATE).astype(np.int64)


def log_normal(num_cuts: int, seed: int = 0, median: float = 9.0, sigma: float = 0.6) -> NDArray[np.int64]:
    return samples(np.random.default_rng(seed).lognormal(np.log(median), sigma, num_cuts).clip(1, 40))


def long_tail(num_cuts: int, seed: int) -> NDArray[np.int64]:
    return samples((3 * np.random.default_rng(seed).pareto(1.5, num_cuts) + 1).clip(1, 120))


def windows(num_cuts: int, seed: int) -> NDArray[np.int64]:
    """Recordings in windows of 30 s, the last of which are shorter."""
    random = np.random.default_rng(seed)
    return samples(np.where(random.random(num_cuts) < 0.9, 30.0, random.uniform(1, 30, num_cuts)))


def two_kinds(num_cuts: int, seed: int) -> NDArray[np.int64]:
    """Commands and sentences."""
    random = np.random.default_rng(seed)
    kinds = random.lognormal(np.log(2), 0.3, num_cuts), random.lognormal(np.log(15), 0.3, num_cuts)
    return samples(np.where(random.random(num_cuts) < 0.5, *kinds).clip(1, 40))


KINDS = {"log_normal": log_normal, "long_tail": long_tail, "windows": windows, "two_kinds": two_kinds}


def sorted_padding(lengths: NDArray[np.int64], budget: int) -> tuple[float, int]:
    """Returns padding and padded samples if sorted cuts fill one microbatch after the other, longest first."""
    end, padded = len(lengths), 0
    while end:
        size = max(1, min(end, budget // int(lengths[end - 1])))
        padded += size * int(lengths[end - 1])
        end -= size
    return 1 - int(lengths.sum()) / padded, padded


@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(300, 8000),
    st.sampled_from([400.0, 800.0, 2000.0, 4000.0]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_steps_are_full_have_equal_work_and_little_padding(
    kind: str, num_cuts: int, seconds: float, per_step: int, seed: int
) -> None:
    lengths = KINDS[kind](num_cuts, seed)
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=seconds, microbatches_per_step=per_step, seed=seed))
    least, needed = sorted_padding(lengths, round(seconds * RATE))
    for epoch in range(len(plan.layouts)):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        indices = [[plan.indices(step, number) for number in range(per_step)] for step in steps]
        seen = np.bincount(np.concatenate([cuts for step in indices for cuts in step]), minlength=num_cuts)
        assert (seen == 1).all()
        work = np.array([[len(cuts) * int(lengths[cuts].max()) for cuts in step] for step in indices])
        assert work.max() <= seconds * RATE
        assert len(steps) <= 1.06 * needed / (per_step * seconds * RATE) + 1
        assert work.sum(1).min() >= 0.5 * work.sum(1).mean()
        shares = work / work.mean(1, keepdims=True)
        # In a tiny corpus, the last microbatch may be small; and few cuts of two minutes cannot be divided evenly.
        assert ((shares.max(1) > 1.15) | (shares.min(1) < 0.8)).sum() <= 1
        assert 1 - int(lengths.sum()) / int(work.sum()) <= least + 0.02


@pytest.mark.parametrize(
    ("hours", "small", "large", "xlarge"), [(2, 22, 22, 28), (15, 85, 85, 71), (60, 85, 85, 94), (250, 97, 97, 95)]
)
def test_steps_have_most_of_the_audio_that_was_asked_for(hours: int, small: int, large: int, xlarge: int) -> None:
    lengths = log_normal(round(hours * 3600 / 10.65))
    for wanted, (seconds, per_step) in ((small, (4000.0, 8)), (large, (2000.0, 16)), (xlarge, (800.0, 32))):
        plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=seconds, microbatches_per_step=per_step))
        summary = summarise_plan(plan, lengths)
        assert 100 * summary.seconds_per_step / summary.seconds_asked == pytest.approx(wanted, abs=1)
        assert summary.padding < {2: 0.16, 15: 0.1, 60: 0.04, 250: 0.025}[hours]


def test_a_large_corpus_pads_little_and_has_steps_of_one_length() -> None:
    lengths = log_normal(1_000_000)
    summary = summarise_plan(BatchPlan(lengths, RATE, PlanConfig()), lengths)
    assert summary.padding == pytest.approx(0.0038, abs=2e-4)
    assert summary.num_mixed_steps <= summary.steps_per_epoch / 100
    assert summary.budget_used > 0.97


@pytest.mark.parametrize("num_cuts", [300, 2000])
def test_the_share_of_pairs_that_stay_together_is_that_of_the_indices(num_cuts: int) -> None:
    lengths = log_normal(num_cuts)
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=240.0, microbatches_per_step=4))
    assert len(plan.layouts) > 1
    kept = total = 0
    pairs: list[set[tuple[int, int]]] = []
    for epoch in range(4 * len(plan.layouts) + 1):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        microbatches = (plan.indices(step, number).tolist() for step in steps for number in range(4))
        pairs.append({pair for cuts in microbatches for pair in combinations(sorted(cuts), 2)})
    for first, second in pairwise(pairs):
        kept += len(first & second)
        total += len(first)
    assert summarise_plan(plan, lengths).pairs_kept == pytest.approx(kept / total, abs=0.02)


def test_cuts_of_one_length_fill_equal_microbatches_and_meet_others_in_every_epoch() -> None:
    lengths = np.full(480, 10 * RATE)
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=240.0, microbatches_per_step=8))
    assert plan.steps_per_epoch == 3
    assert plan.shapes == [(20, 10 * RATE)]
    # 24 microbatches of one length: about one in 24 of the others is there again.
    assert summarise_plan(plan, lengths).pairs_kept == pytest.approx(1 / 24, abs=0.005)


def test_repeated_cuts_change_with_the_epoch() -> None:
    plan = BatchPlan(np.full(101, 60 * RATE), RATE, PlanConfig(max_batch_seconds=100.0, microbatches_per_step=8))
    repeats = []
    for epoch in range(6):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        seen = np.bincount(np.concatenate([plan.indices(step, number) for step in steps for number in range(8)]))
        repeats.append(frozenset(np.flatnonzero(seen == 2).tolist()))
    assert {len(indices) for indices in repeats} == {3}  # 101 cuts, one in each of 104 microbatches
    assert len(set(repeats)) > 1


def test_a_corpus_of_less_than_two_steps_is_named_with_settings_that_suit_it() -> None:
    lengths = log_normal(700)
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=2000.0, microbatches_per_step=16))
    text = few_steps_text(plan, summarise_plan(plan, lengths))
    assert text == (
        "the corpus holds 0.25 steps of the 32,000 s that were asked for. For about 8 steps an epoch: "
        "--max-batch-seconds 1011 --microbatches-per-step 1"
    )
    suitable = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=1011.0, microbatches_per_step=1))
    assert suitable.steps_per_epoch == 9  # eight, and one more for what does not fit
    assert few_steps_text(suitable, summarise_plan(suitable, lengths)) is None
    # With more audio, the microbatch stays as it is, and a step has fewer of them.
    lengths = log_normal(3000)
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=800.0, microbatches_per_step=32))
    text = few_steps_text(plan, summarise_plan(plan, lengths))
    assert text is not None
    assert text.endswith("epoch: --microbatches-per-step 5")


def test_cuts_shorter_than_min_seconds_are_left_out_counted_and_named() -> None:
    first, second = samples(np.array([0.4, 0.9, 1.0, 2.0] + 40 * [3.0])), samples(np.array([0.5, 1.5] + 40 * [2.5]))
    config = PlanConfig(max_batch_seconds=30.0, microbatches_per_step=2, min_seconds=1.0)
    plan = BatchPlan([first, second], RATE, config)
    steps = [plan.indices(step, number) for step in range(plan.steps_per_epoch) for number in range(2)]
    assert sorted(np.concatenate(steps).tolist()) == [*range(2, 44), *range(45, 86)]
    summary = summarise_plan(plan, [first, second])
    assert (summary.num_left_out, summary.hours_left_out) == (3, pytest.approx(1.8 / 3600))
    assert [corpus.num_cuts for corpus in summary.corpora] == [42, 41]
    text = left_out_text(plan)
    assert text is not None
    assert text.startswith("3 cuts, 2 s, shorter than min_seconds (1 s). To keep them, repeated up to 1 s, set ")
    for step in range(plan.steps_per_epoch):
        assert plan.substitute(plan.microbatch(step, 0), 0, 0) not in (0, 1, 44)
