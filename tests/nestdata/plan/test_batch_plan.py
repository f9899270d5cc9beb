from collections import Counter
from dataclasses import replace
from typing import Any

import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nestdata import BatchPlan, ConfigError, MixtureStage, PlanConfig, PlanError, summarise_plan
from nestdata.plan.budget import LeftOut
from tests.nestdata.plan.plans import microbatches_of_epoch, spread_lengths

RATE = 100
"""Samples per second; small, so that lengths in the tests are easy to read."""


TEN = {"max_batch_seconds": 10.0, "microbatches_per_step": 2}


def plan_of(lengths: list[int] | NDArray[np.int64], config: PlanConfig | dict[str, Any]) -> BatchPlan:
    settings = PlanConfig(**config) if isinstance(config, dict) else config
    return BatchPlan(np.asarray(lengths, dtype=np.int64), RATE, settings)


@st.composite
def length_lists(draw: st.DrawFn) -> list[int]:
    """Ascending lengths: few and arbitrary, or many and log-normal as in a real corpus."""
    if draw(st.booleans()):
        return sorted(draw(st.lists(st.integers(1, 3000), min_size=1, max_size=60)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = random.lognormal(mean=draw(st.floats(2, 7)), sigma=draw(st.floats(0, 1)), size=draw(st.integers(1, 800)))
    return sorted(np.clip(spread, 1, 3000).astype(int).tolist())


# A dict instead of a PlanConfig: the type checks of the test run would draw random numbers to check a PlanConfig.
Case = tuple[list[int], dict[str, Any]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Lengths, and settings that they fit."""
    lengths = draw(length_lists())
    min_samples = draw(st.integers(1, 200))
    least = max(lengths[-1], min_samples)
    config = {
        "max_batch_seconds": draw(st.integers(least, draw(st.sampled_from([1, 3, 20])) * least)) / RATE,
        "microbatches_per_step": draw(st.integers(1, min(12, len(lengths)))),
        "min_audio_seconds": min_samples / RATE,
        "bucket_width": draw(st.sampled_from([1 / 32, 1 / 100, 1 / 1000])),
        "seed": draw(st.integers(0, 2**32)),
    }
    return lengths, config


@given(cases())
@settings(deadline=None, max_examples=12)
def test_each_epoch_shows_every_cut_within_the_budget_and_repeats_fewer_than_microbatches_in_one_step(
    case: Case,
) -> None:
    lengths, plan = case[0], plan_of(*case)
    budget = round(plan.config.max_batch_seconds * RATE)
    for epoch in range(len(plan.layouts)):
        microbatches = microbatches_of_epoch(plan, epoch)
        for index, indices in microbatches.items():
            padded = plan.microbatch(*index).padded_samples
            assert (len(indices), padded) in plan.shapes
            assert 0 < len(indices) * padded <= budget
            assert plan.min_samples <= padded
            assert max(lengths[index] for index in indices) <= padded
        seen = Counter(index for indices in microbatches.values() for index in indices)
        assert set(seen) == set(range(len(lengths)))
        assert max(seen.values()) <= 2
        assert seen.total() - len(lengths) < plan.config.microbatches_per_step
        repeated = [index for index in seen if seen[index] == 2]
        steps_with = [{step for (step, _), indices in microbatches.items() if index in indices} for index in repeated]
        assert not repeated or set.intersection(*steps_with)


def test_narrower_buckets_pad_less_in_as_many_steps() -> None:
    lengths = np.sort(np.random.default_rng(0).lognormal(np.log(9000), 0.6, 100_000).clip(1000, 40_000).astype(int))
    plans = [plan_of(lengths, PlanConfig(max_batch_seconds=240_000 / RATE, bucket_width=w)) for w in (1 / 32, 1 / 128)]
    wide, narrow = (summarise_plan(plan, lengths) for plan in plans)
    assert narrow.padding < 0.75 * wide.padding
    assert narrow.steps_per_epoch == pytest.approx(wide.steps_per_epoch, rel=0.005)
    for plan, width in zip(plans, (1 / 32, 1 / 128), strict=True):
        spans = [
            1 - lengths[b.cut_ranges[0].first_index] / b.padded_samples for b in plan.buckets if b.num_microbatches > 32
        ]
        assert 0 < max(spans) <= width + 1 / 1000


@pytest.mark.parametrize("total", [1, 2, 6, 8, 12])
def test_ranks_of_any_world_size_share_each_step_evenly_and_completely(total: int) -> None:
    plan = plan_of([100] * 20, PlanConfig(microbatches_per_step=total))
    for world_size in (n for n in range(1, total + 1) if total % n == 0):
        shares = [plan.microbatches_of(rank, world_size) for rank in range(world_size)]
        assert {len(share) for share in shares} == {total // world_size}
        assert [number for share in shares for number in share] == list(range(total))


def test_indices_of_a_small_plan_are_the_same_in_every_version() -> None:
    lengths = [50, 120, 150, 200, 210, 220, 295, 300, 310, 320, 330, 400, 410, 420, 425]
    plan = plan_of(lengths, PlanConfig(max_batch_seconds=8.5, microbatches_per_step=2, seed=7))
    assert plan.steps_per_epoch == 4
    assert [[plan.microbatch(step, number).padded_samples for number in range(2)] for step in range(4)] == [
        [425, 425],
        [410, 400],
        [320, 320],
        [220, 150],
    ]
    assert [[plan.indices(step, number).tolist() for number in range(2)] for step in range(8)] == [
        [[13], [14]],
        [[12], [10, 11]],
        [[8, 6], [7, 9]],
        [[4, 5, 3], [0, 2, 1]],
        [[6, 9], [7, 8]],
        [[12], [10, 11]],
        [[4, 3, 5], [1, 0, 2]],
        [[14], [13]],
    ]
    assert plan.fingerprint == "d14e157b4942c43afa51283f991be4b9"


def test_indices_of_a_plan_with_every_setting_are_the_same_in_every_version() -> None:
    corpora = [np.array([50, 120, 150, 200, 210, 220, 295, 300]), np.array([80, 140, 260, 290])]
    config = PlanConfig(
        max_batch_seconds=12.0,
        microbatches_per_step=2,
        quadratic_seconds=10.0,
        max_cuts=3,
        num_shapes=2,
        weights=(1.0, 1.0),
        temperature=2.0,
        seed=7,
    )
    plan = BatchPlan(corpora, RATE, config)
    assert plan.repeats_per_epoch == [0.749, 1.503]
    assert [[plan.indices(step, number).tolist() for number in range(2)] for step in range(6)] == [
        [[1, 2, 9], [9, 8, 0]],
        [[10, 4, 6], [11, 11, 7]],
        [[0, 8, 8], [0, 9, 0]],
        [[3, 3, 10], [10, 5, 11]],
        [[2, 9, 9], [1, 8, 8]],
        [[6, 11, 4], [11, 10, 7]],
    ]
    assert [plan.substitute(plan.microbatch(step, 0), 1, 0) for step in range(6)] == [2, 8, 9, 0, 2, 8]
    assert plan.fingerprint == "9811394861aa4a49e3b6e5e8ff128781"


def test_step_far_beyond_the_first_epochs_is_computed_directly() -> None:
    plan = plan_of(list(range(100, 300)), PlanConfig(max_batch_seconds=10.0))
    step = 10**12 * plan.steps_per_epoch + 3
    assert plan.epoch(step) == 10**12
    assert len(plan.indices(step, 7)) * plan.microbatch(step, 7).padded_samples <= 10.0 * RATE


def test_cuts_that_no_microbatch_can_hold_are_left_out_and_counted() -> None:
    config = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=2)
    first, second = np.array([100] * 30 + [1000] * 30), np.array([200] * 30 + [1001, 1500])
    plan, without = (BatchPlan([first, lengths], RATE, config) for lengths in (second, second[:-2]))
    assert plan.left_out == LeftOut(num_long=2, long_samples=2501, num_short=0, short_samples=0)
    assert without.left_out == replace(plan.left_out, num_long=0, long_samples=0)
    assert plan.buckets == without.buckets
    assert {tuple(indices) for indices in microbatches_of_epoch(plan).values()} == {
        tuple(indices) for indices in microbatches_of_epoch(without).values()
    }
    summary = summarise_plan(plan, [first, second])
    assert summary.num_left_out == 2
    assert summary.hours_left_out == 25.01 / 3600
    assert [corpus.num_cuts for corpus in summary.corpora] == [60, 30]


@pytest.mark.parametrize(
    ("lengths", "config", "message"),
    [
        ([], {}, "corpus is empty"),
        ([100] * 3, {"microbatches_per_step": 4}, r"3 cuts .*, fewer than plan\.microbatches_per_step \(4\).*Lower"),
        ([50] * 20, {"min_seconds": 1.0}, r"all 20 cuts are shorter than plan\.min_seconds \(1 s\)\. Lower it"),
        ([989] * 20 + [1100] * 2, TEN, r"2 of 22 cuts, with 10 % .*; the longest lasts 11\.0 s\..*max_batch_seconds"),
        ([1001], TEN, r"1 of 1 cuts, with 100 % .*--window-seconds 10"),
        (
            [100] * 8 + [3000],
            {"max_batch_seconds": 40.0, "quadratic_seconds": 20.0},
            r"1 of 9 cuts.* \(20 s, quadratic term included\); the longest lasts 30\.0 s",
        ),
    ],
)
def test_a_corpus_that_does_not_fit_the_settings_is_an_error_that_says_what_to_change(
    lengths: list[int], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(lengths, config)


def test_cuts_with_up_to_a_tenth_of_the_audio_may_be_too_long() -> None:
    assert plan_of([990] * 20 + [1100] * 2, TEN).left_out.num_long == 2


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (0, 12, r"12 ranks cannot share .* 1, 2, 4, 8 ranks"),
        (2, 2, "rank 2 does not exist among 2 ranks"),
        (-1, 2, "rank -1 does not exist among 2 ranks"),
        (0, 0, "rank 0 does not exist among 0 ranks"),
    ],
)
def test_ranks_that_cannot_share_a_step_are_rejected(rank: int, world_size: int, message: str) -> None:
    plan = plan_of([100] * 50, PlanConfig(microbatches_per_step=8))
    with pytest.raises(ConfigError, match=message):
        plan.microbatches_of(rank, world_size)


@pytest.mark.parametrize(("step", "microbatch"), [(-1, 0), (0, -1), (0, 8)])
def test_batch_indices_outside_the_plan_are_rejected(step: int, microbatch: int) -> None:
    plan = plan_of([100] * 50, PlanConfig(microbatches_per_step=8))
    with pytest.raises(IndexError, match=rf"step {step}, microbatch {microbatch}"):
        plan.indices(step, microbatch)


def test_fingerprint_changes_with_every_setting() -> None:
    lengths = [np.array([100, 150, 200, 250]), np.array([100, 120]), np.array([110])]
    config = without_languages = PlanConfig(microbatches_per_step=2)
    changes: dict[str, Any] = {
        "max_batch_seconds": 241.0,
        "microbatches_per_step": 4,
        "min_audio_seconds": 1.5,
        "min_seconds": 0.5,
        "quadratic_seconds": 30.0,
        "max_cuts": 1,
        "bucket_width": 1 / 64,
        "num_shapes": 1,
        "weights": (1.0, 3.0, 2.0),
        "temperature": 2.0,
        "language_temperature": 3.0,
        "stages": (MixtureStage(from_step=3),),
        "seed": 1,
    }
    assert {*changes, "languages"} == set(PlanConfig.__dataclass_fields__)
    # Languages change the plan only together with a temperature.
    config = replace(config, languages=("en", "en", "sw"))
    assert BatchPlan(lengths, RATE, config).fingerprint == BatchPlan(lengths, RATE, without_languages).fingerprint
    changed = [replace(config, **{name: value}) for name, value in changes.items()]
    assert len({BatchPlan(lengths, RATE, each).fingerprint for each in [config, *changed]}) == len(changes) + 1


def test_fingerprint_changes_with_lengths_rate_and_content() -> None:
    lengths, config = np.array([100, 150, 200, 250]), PlanConfig(microbatches_per_step=2)
    plans = [
        BatchPlan(lengths, RATE, config),
        BatchPlan(lengths + 1, RATE, config),
        BatchPlan(lengths, RATE + 1, config),
        BatchPlan(lengths, RATE, config, content="speech"),
        BatchPlan(lengths, RATE, config, content="speech after a change"),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)


def test_fingerprint_is_equal_for_whole_seconds_as_int_and_as_float(monkeypatch: pytest.MonkeyPatch) -> None:
    # Users do not have the checks of annotations, which accept no int for a float.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    configs = [PlanConfig(max_batch_seconds=seconds, microbatches_per_step=2) for seconds in (20, 20.0)]
    assert len({BatchPlan(np.array([9, 9]), 1, config).fingerprint for config in configs}) == 1


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    microbatches=st.integers(1, 4),
    quadratic=st.sampled_from([None, 20.0, 100.0]),
    max_cuts=st.sampled_from([None, 1, 7]),
    num_shapes=st.sampled_from([None, 1, 3]),
    weighted=st.booleans(),
    temperature=st.sampled_from([1.0, 3.0]),
    seed=st.integers(0, 100),
)
@settings(deadline=None, max_examples=20)
def test_cuts_of_several_corpora_share_the_budget_and_are_repeated_as_often_as_their_corpus_requires(
    sizes: list[int],
    microbatches: int,
    quadratic: float | None,
    max_cuts: int | None,
    num_shapes: int | None,
    weighted: bool,
    temperature: float,
    seed: int,
) -> None:
    corpora = [spread_lengths(size, seed + i) for i, size in enumerate(sizes)]
    config = PlanConfig(
        max_batch_seconds=4000.0,
        microbatches_per_step=min(microbatches, max(sizes)),
        quadratic_seconds=quadratic,
        max_cuts=max_cuts,
        num_shapes=num_shapes,
        weights=tuple(float(1 + i) for i in range(len(sizes))) if weighted else None,
        temperature=temperature,
        seed=seed,
    )
    plan = BatchPlan(corpora, RATE, config)
    lengths = np.concatenate(corpora)
    budget = 4000 * RATE
    num_epochs = 3
    seen: Counter[int] = Counter()
    for epoch in range(num_epochs):
        for index, indices in microbatches_of_epoch(plan, epoch).items():
            padded = plan.microbatch(*index).padded_samples
            cost = padded + (padded**2 // round(quadratic * RATE) if quadratic else 0)
            assert len(indices) * cost <= budget
            assert len(indices) == plan.microbatch(*index).bucket.cuts_per_microbatch <= (max_cuts or budget)
            assert lengths[indices].max() <= padded
            seen.update(indices)
    fillers = {
        bucket.num_microbatches * bucket.cuts_per_microbatch - bucket.num_cuts
        for layout in plan.layouts
        for bucket in layout
    }
    first_index = 0
    for corpus, repeats_per_epoch in zip(corpora, plan.repeats_per_epoch, strict=True):
        times = [seen[index] for index in range(first_index, first_index + len(corpus))]
        first_index += len(corpus)
        # Each position is shown once per epoch; repeats that fill up a step are added to that.
        positions = max(1, int(len(corpus) * round(1000 * repeats_per_epoch) // 1000))
        assert sum(times) >= num_epochs * positions
        if not any(fillers):
            assert sum(times) == num_epochs * positions
            if repeats_per_epoch == 1.0:
                assert set(times) == {num_epochs}


def test_repeated_cuts_of_weighted_corpora_are_repeated_equally_often() -> None:
    corpora = [np.full(400, 100), np.full(100, 100)]
    plan = BatchPlan(corpora, RATE, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=2, weights=(1.0, 1.0)))
    assert plan.repeats_per_epoch == [0.625, 2.5]
    for epoch in range(4):
        seen = Counter(index for indices in microbatches_of_epoch(plan, epoch).values() for index in indices)
        assert {seen[index] for index in range(400, 500)} == {2, 3}
    for num_epochs, indices_of_one, times in ((2, range(400, 500), 5), (8, range(400), 5)):
        indices = [
            index
            for epoch in range(num_epochs)
            for indices in microbatches_of_epoch(plan, epoch).values()
            for index in indices
        ]
        seen = Counter(indices)
        assert {seen[index] for index in indices_of_one} == {times}


def test_microbatches_mix_cuts_of_all_corpora() -> None:
    corpora = [spread_lengths(2000, 0), spread_lengths(2000, 1)]
    plan = BatchPlan(corpora, RATE, PlanConfig(max_batch_seconds=400.0))
    shares = [np.mean(np.array(indices) < 2000) for indices in microbatches_of_epoch(plan).values()]
    assert 0.35 < np.median(shares) < 0.65


def test_splitting_a_corpus_in_two_does_not_change_the_shapes() -> None:
    lengths = spread_lengths(3000, 0)
    config = PlanConfig(max_batch_seconds=400.0)
    whole, parts = (
        BatchPlan(lengths, RATE, config),
        BatchPlan([lengths[::3], np.delete(lengths, np.s_[::3])], RATE, config),
    )
    shape = [(b.num_cuts, b.cuts_per_microbatch, b.padded_samples, b.num_microbatches) for b in whole.buckets]
    assert [(b.num_cuts, b.cuts_per_microbatch, b.padded_samples, b.num_microbatches) for b in parts.buckets] == shape


def test_num_shapes_limits_the_shapes_and_padding_falls_with_their_number() -> None:
    lengths = spread_lengths(6_000, 0)
    paddings = []
    for number in (2, 4):
        plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=100.0, microbatches_per_step=4, num_shapes=number))
        shapes = {(bucket.cuts_per_microbatch, bucket.padded_samples) for bucket in plan.buckets}
        assert len(shapes) == len(plan.buckets) <= number
        positions = sum(b.num_microbatches * b.cuts_per_microbatch * b.padded_samples for b in plan.buckets)
        paddings.append(1 - lengths.sum() / positions)
        seen = Counter(index for indices in microbatches_of_epoch(plan).values() for index in indices)
        assert set(seen) == set(range(len(lengths)))
    assert paddings[1] < paddings[0]


def test_substitutes_are_of_similar_length_and_differ_by_attempt() -> None:
    lengths = spread_lengths(3000, 0)
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=400.0, microbatches_per_step=4))
    for step in range(plan.steps_per_epoch):
        (cuts,) = plan.microbatch(step, 1).bucket.cut_ranges
        end = cuts.first_index + cuts.num_cuts
        indices = [plan.substitute(plan.microbatch(step, 1), 0, attempt) for attempt in range(20)]
        assert all(min(cuts.first_index, max(0, end - 64)) <= index < end for index in indices)
        assert len(set(indices)) > 10
        assert indices == [plan.substitute(plan.microbatch(step, 1), 0, attempt) for attempt in range(20)]


LENGTHS = [100, 120, 150, 200, 210, 220, 295, 300, 310, 320, 330, 400]
CONFIG = PlanConfig(max_batch_seconds=8.5, microbatches_per_step=2, seed=7)


@pytest.mark.parametrize(
    "lengths", [LENGTHS, np.array(LENGTHS, np.int32), np.array(LENGTHS, ">i8"), [np.array(LENGTHS, np.int32)]]
)
def test_plan_is_the_same_for_lists_and_all_integer_types(lengths: Any) -> None:
    expected = BatchPlan(np.array(LENGTHS, np.int64), RATE, CONFIG)
    plan = BatchPlan(lengths, RATE, CONFIG)
    assert plan.fingerprint == expected.fingerprint
    assert plan.indices(0, 0).tolist() == expected.indices(0, 0).tolist()
    assert summarise_plan(plan, lengths) == summarise_plan(expected, [np.array(LENGTHS, np.int64)])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([100.0, 200.0], r"have the type float64: give whole numbers of samples"),
        (np.array([True, True]), r"have the type bool: give whole numbers of samples"),
        (np.array([[100, 200]]), r"have the shape \(1, 2\): give one number per cut for each corpus"),
        ([100, [200]], r"must be one list of integers per corpus"),
        ([100, 300, 200, 400], r"must be ascending: 200 follows 300 at index 2\. Sort them"),
        ([-100, 200], r"must not be negative: the first is -100"),
    ],
)
def test_lengths_that_cannot_be_planned_are_rejected(lengths: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"^cut lengths {message}"):
        BatchPlan(lengths, RATE, PlanConfig(microbatches_per_step=2))
