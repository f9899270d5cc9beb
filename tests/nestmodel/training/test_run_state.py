import math
import time
from typing import Any

import pytest

from nestmodel.training.run_state import RunClock, read_state
from nestmodel.training.step_limits import num_steps_of_run
from tests.training import StubTrainer


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_the_time_left_counts_the_steps_after_the_first_five_of_this_start() -> None:
    now = Clock()
    clock = RunClock(1000, now)
    for step in range(1001, 1011):
        now.seconds += 60.0 if step <= 1005 else 2.0
        clock.count(step)
        left = clock.seconds_left(step, 1100)
        assert left == (None if step <= 1005 else pytest.approx(2.0 * (1100 - step)))
    now.seconds += 10.0  # a validation
    assert clock.seconds_left(1010, 1100) == pytest.approx(90 * 20 / 5)
    assert clock.seconds_left(1010, None) is None


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_steps": 100}, 100),
        ({"max_steps": 100, "max_epochs": 3}, 30),
        ({"max_steps": 10, "max_epochs": 3}, 10),
        ({"max_steps": -1, "max_epochs": 3}, 30),
        ({"max_steps": -1, "max_epochs": -1}, None),
        ({"max_steps": -1, "max_epochs": 2, "num_training_batches": math.inf}, None),
    ],
)
def test_the_steps_of_a_run_end_with_the_first_limit(settings: dict[str, Any], steps: int | None) -> None:
    assert num_steps_of_run(StubTrainer(**settings)) == steps


@pytest.mark.parametrize(("limit", "steps"), [(1.0, 120), (14, 21), (800, 120)])
def test_the_steps_of_a_run_are_known_before_its_loader_is(limit: float, steps: int) -> None:
    trainer = StubTrainer(max_steps=-1, max_epochs=3, limit_train_batches=limit, num_training_batches=0)
    assert num_steps_of_run(trainer, steps_per_epoch=40) == steps


def test_max_time_ends_the_time_left() -> None:
    trainer = StubTrainer(1)
    trainer.lightning_module.stop_requests.deadline_s = time.monotonic() - 1
    assert read_state(trainer, RunClock(0), "training").seconds_left == 0
