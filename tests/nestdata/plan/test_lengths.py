from typing import Any

import numpy as np
import pytest

from nestdata import BatchPlan, PlanConfig, PlanError, summarise_plan

RATE = 100
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
