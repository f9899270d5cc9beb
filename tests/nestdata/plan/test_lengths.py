from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nestdata import BatchPlan, PlanConfig, PlanError, summarise_plan

RATE = 100
LENGTHS = [100, 120, 150, 200, 210, 220, 295, 300, 310, 320, 330, 400]
CONFIG = PlanConfig(max_batch_seconds=8.5, microbatches_per_step=2, seed=7)


def microbatches_of(plan: BatchPlan) -> list[list[int]]:
    return [plan.indices(step, number).tolist() for step in range(plan.steps_per_epoch) for number in range(2)]


@pytest.mark.parametrize(
    "lengths",
    [
        LENGTHS,
        tuple(LENGTHS),
        np.array(LENGTHS, np.int32),
        np.array(LENGTHS, np.uint16),
        np.array(LENGTHS, np.uint64),
        np.array(LENGTHS, ">i8"),
        [np.array(LENGTHS, np.int32)],
        [LENGTHS],
    ],
)
def test_plan_is_the_same_for_lists_and_all_integer_types(lengths: Any) -> None:
    expected = BatchPlan(np.array(LENGTHS, np.int64), RATE, CONFIG)
    plan = BatchPlan(lengths, RATE, CONFIG)
    assert plan.fingerprint == expected.fingerprint
    assert microbatches_of(plan) == microbatches_of(expected)
    expected_summary = summarise_plan(expected, [np.array(LENGTHS, np.int64)])
    assert summarise_plan(plan, lengths) == expected_summary


def test_several_corpora_may_have_different_integer_types() -> None:
    expected = BatchPlan([np.array(LENGTHS, np.int64), np.array(LENGTHS, np.int64)], RATE, CONFIG)
    plan = BatchPlan([LENGTHS, np.array(LENGTHS, np.int32)], RATE, CONFIG)
    assert plan.fingerprint == expected.fingerprint
    assert microbatches_of(plan) == microbatches_of(expected)


@pytest.mark.parametrize("num_shapes", [None, 2])
def test_lengths_are_converted_once_before_any_search(monkeypatch: pytest.MonkeyPatch, num_shapes: int | None) -> None:
    searched: list[NDArray[Any]] = []
    search = np.searchsorted

    def record(array: NDArray[Any], *args: Any, **options: Any) -> Any:
        searched.append(array)
        return search(array, *args, **options)

    monkeypatch.setattr(np, "searchsorted", record)
    config = PlanConfig(max_batch_seconds=8.5, microbatches_per_step=2, num_shapes=num_shapes)
    BatchPlan(np.array(LENGTHS, np.int32), RATE, config)
    assert len(searched) > 1
    assert all(np.shares_memory(array, searched[0]) for array in searched)
    assert searched[0].dtype == np.int64


def test_int64_lengths_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.array(LENGTHS, np.int64)
    searched: list[NDArray[Any]] = []
    search = np.searchsorted

    def record(array: NDArray[Any], *args: Any, **options: Any) -> Any:
        searched.append(array)
        return search(array, *args, **options)

    monkeypatch.setattr(np, "searchsorted", record)
    BatchPlan(lengths, RATE, CONFIG)
    assert searched
    assert all(np.shares_memory(array, lengths) for array in searched)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (np.array([100.0, 200.0]), r"have the type float64: give whole numbers of samples"),
        ([100.0, 200.0], r"have the type float64: give whole numbers of samples"),
        (np.array([True, True]), r"have the type bool: give whole numbers of samples"),
        (["100", "200"], r"have the type <U3: give whole numbers of samples"),
        (np.array([[100, 200]]), r"have the shape \(1, 2\): give one number per cut for each corpus"),
        ([[[100, 200]]], r"have the shape \(1, 2\): give one number per cut for each corpus"),
        (np.array(100), r"have the shape \(\): give one number per cut for each corpus"),
        ([100, [200]], r"must be one list of integers per corpus"),
        ([100, 300, 200, 400], r"must be ascending: 200 follows 300 at index 2\. Sort them"),
        ([[100, 300], [300, 200]], r"must be ascending: 200 follows 300 at index 1\. Sort them"),
        ([-100, 200], r"must not be negative: the first is -100"),
    ],
)
def test_lengths_that_cannot_be_planned_are_rejected(lengths: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"^cut lengths {message}"):
        BatchPlan(lengths, RATE, PlanConfig(microbatches_per_step=2))
