from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nestdata import BatchPlan, PlanConfig, summarise_plan

RATE = 16000

# (microbatches per step, seconds of a microbatch) of presets.
PRESETS = {"demo": (1, 40.0), "small": (8, 4000.0), "xlarge": (8, 800.0)}


def case_of_one_long_recording() -> NDArray[np.int64]:
    """120 recordings of 5.5 to 12 s, half of them equally long, and one of 74 s."""
    seconds = [5.5] * 56 + np.geomspace(5.6, 12, 64).tolist() + [74.0]
    return (np.array(seconds) * RATE).astype(np.int64)


def log_normal(num_cuts: int, seed: int = 0) -> NDArray[np.int64]:
    seconds = np.random.default_rng(seed).lognormal(np.log(9), 0.6, num_cuts).clip(1, 40)
    return np.sort(seconds * RATE).astype(np.int64)


def read_speech(num_cuts: int, seed: int = 0) -> NDArray[np.int64]:
    """Lengths as those of LibriSpeech: most are near the longest."""
    random = np.random.default_rng(seed)
    seconds = np.where(random.random(num_cuts) < 0.7, random.uniform(12, 16, num_cuts), random.uniform(2, 12, num_cuts))
    return np.sort(seconds * RATE).astype(np.int64)


def least_samples(lengths: list[int], microbatches: int, budget: int, min_cuts: int = 1) -> int:
    """Returns the least samples with padding of any steps that have one shape each, by trying every first step."""
    longest = lengths[::-1]
    num_rows = -(-len(longest) // microbatches)
    least = [0] * (num_rows + 1)
    for row in reversed(range(num_rows)):
        length = longest[row * microbatches]
        limit = budget // length
        least[row] = min(
            size * microbatches * length + least[row + size]
            for size in range(1, min(limit, num_rows - row) + 1)
            if size >= min(limit, min_cuts) or row + size == num_rows
        )
    return least[0]


@pytest.mark.parametrize("preset", ["small", "xlarge"])
@pytest.mark.parametrize(
    "lengths",
    [
        case_of_one_long_recording(),
        case_of_one_long_recording()[:-1],
        *(make(number) for make, number in product((log_normal, read_speech), (100, 500))),
    ],
    ids=lambda lengths: f"{len(lengths)}",
)
def test_a_small_corpus_pads_at_most_1_15_times_the_least(preset: str, lengths: NDArray[np.int64]) -> None:
    microbatches, seconds = PRESETS[preset]
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=seconds, microbatches_per_step=microbatches))
    least = 1 - int(lengths.sum()) / least_samples(lengths.tolist(), microbatches, round(seconds * RATE))
    assert summarise_plan(plan, lengths).padding <= 1.15 * least


def test_a_single_microbatch_per_step_pads_little_without_becoming_one_cut() -> None:
    microbatches, seconds = PRESETS["demo"]
    lengths = log_normal(279)
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=seconds, microbatches_per_step=microbatches))
    summary = summarise_plan(plan, lengths)
    assert summary.padding <= 0.03
    assert summary.budget_used >= 0.75


def test_cuts_of_one_length_fill_microbatches() -> None:
    lengths = np.full(480, 10 * RATE)
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=240.0, microbatches_per_step=8))
    assert [(bucket.cuts_per_microbatch, bucket.num_groups) for bucket in plan.buckets] == [(24, 2), (12, 1)]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40).map(sorted),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=60)
def test_steps_are_the_fewest_whose_padding_is_within_a_tenth_of_the_least(
    lengths: list[int], microbatches: int, times: int, spread: int
) -> None:
    budget = times * lengths[-1] + spread
    config = PlanConfig(max_batch_seconds=float(budget), microbatches_per_step=microbatches, min_audio_seconds=1.0)
    if len(lengths) < microbatches:
        return
    plan = BatchPlan(np.array(lengths), 1, config)
    steps = [
        (bucket.cuts_per_microbatch, bucket.padded_samples) for bucket in plan.buckets for _ in range(bucket.num_groups)
    ]
    total = microbatches * sum(size * length for size, length in steps)
    num_empty = -len(lengths) % microbatches
    fillers = lengths[: 2 * num_empty][-1:] or [0]
    # Fillers may be longer than the shortest cuts, whose step they complete.
    least = least_samples(lengths, microbatches, budget, -(-8 // microbatches))
    most = max(sum(lengths) * 103 // 100, sum(lengths) + (least - sum(lengths)) * 11 // 10)
    assert total <= most + microbatches * max(0, fillers[0] - lengths[0]) * max(size for size, _ in steps)
