from typing import Any

import pytest
from pytorch_lightning.callbacks import EarlyStopping

from nestmodel.training.starting.run_summary import end_reason
from nestmodel.training.step_stats import StopRequests
from tests.training import StubTrainer


def early_stopping(message: str | None) -> EarlyStopping:
    made = EarlyStopping("val_loss")
    made.stopping_reason_message = message
    return made


@pytest.mark.parametrize(
    ("settings", "requests", "reason"),
    [
        ({"should_stop": False}, {}, None),
        ({"should_stop": True}, {}, "a callback has set trainer.should_stop"),
        ({"should_stop": True, "callbacks": [early_stopping("val_loss is NaN")]}, {}, "val_loss is NaN"),
        ({"should_stop": True}, {"must_finish": True}, "trainer.max_time has passed"),
    ],
)
def test_what_ended_a_run_is_known(settings: dict[str, Any], requests: dict[str, bool], reason: str | None) -> None:
    assert end_reason(StubTrainer(50, **settings), StopRequests(**requests)) == reason
