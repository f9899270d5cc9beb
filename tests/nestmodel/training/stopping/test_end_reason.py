from typing import Any

import pytest
from pytorch_lightning.callbacks import EarlyStopping

from nestmodel.training.display import end_reason
from nestmodel.training.step_stats import StopRequests
from tests.nestmodel.training.test_run_state import StubTrainer

STEPS_PER_EPOCH = 40


def early_stopping(message: str | None) -> EarlyStopping:
    made = EarlyStopping("val_loss")
    made.stopping_reason_message = message
    return made


@pytest.mark.parametrize(
    ("step", "first_step", "settings", "reason"),
    [
        (100, 0, {}, None),
        (100, 60, {}, None),
        (100, 100, {}, "trainer.max_steps of 100 was reached by earlier starts: raise it to train longer"),
        (
            120,
            120,
            {"max_steps": 100},
            "trainer.max_steps of 100 was reached by earlier starts: raise it to train longer",
        ),
        (
            80,
            80,
            {"max_steps": -1, "max_epochs": 2},
            "trainer.max_epochs of 2 was reached by earlier starts: raise it to train longer",
        ),
        (0, 0, {"max_steps": -1, "max_epochs": 0}, "no step was made: trainer.max_epochs is 0"),
        (
            0,
            0,
            {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 0},
            "no step was made: trainer.limit_train_batches is 0",
        ),
        (50, 0, {"should_stop": True}, "a callback has set trainer.should_stop"),
        (50, 0, {"should_stop": True, "callbacks": [early_stopping("val_loss is NaN")]}, "val_loss is NaN"),
        (50, 50, {"should_stop": True}, "no step was made: a callback has set trainer.should_stop"),
    ],
)
def test_the_limit_that_ended_a_run_is_known(
    step: int, first_step: int, settings: dict[str, Any], reason: str | None
) -> None:
    trainer = StubTrainer(step, **{"should_stop": False, **settings})
    assert end_reason(trainer, StopRequests(), STEPS_PER_EPOCH, first_step) == reason


@pytest.mark.parametrize(("step", "reason"), [(50, "trainer.max_time has passed"), (100, None)])
def test_max_time_has_passed_if_it_has_by_the_clock_of_any_rank(step: int, reason: str | None) -> None:
    trainer = StubTrainer(step, should_stop=True)
    assert end_reason(trainer, StopRequests(must_finish=True), STEPS_PER_EPOCH, 0) == reason
