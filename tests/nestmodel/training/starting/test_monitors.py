from pathlib import Path
from typing import Any

import pytest

from nestmodel import CheckpointConfig, Checkpoints, ConfigError
from nestmodel.training.starting.run_checks import check_monitors
from tests.training import tiny_config, trainer


@pytest.mark.parametrize(
    ("monitor", "settings", "message"),
    [
        (
            "val_rank",
            {},
            r"checkpoints\.monitor is 'val_rank', which is not logged: take one of val_loss, val_accuracy",
        ),
        ("val_loss", {"validates": False}, "there is no validation: give data.val_corpus"),
        ("val_loss", {"limit_val_batches": 0}, "leave trainer.limit_val_batches as it is"),
        ("val_loss", {"every_n_steps": 7}, "validations come after steps without a checkpoint"),
        ("val_loss", {"check_val_every_n_epoch": 1}, "validations come after steps without a checkpoint"),
        ("val_loss", {}, ""),
        ("val_loss_2_0", {}, ""),
        ("val_loss_4_1", {}, "checkpoints.monitor is 'val_loss_4_1', which is not logged"),
        (None, {"every_n_steps": 7}, ""),
    ],
)
def test_the_metric_of_the_best_checkpoint_has_to_be_logged_at_steps_of_checkpoints(
    tmp_path: Path, monitor: str | None, settings: dict[str, Any], message: str
) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=settings.get("every_n_steps", 10), monitor=monitor))
    limits = {"check_val_every_n_epoch": settings.get("check_val_every_n_epoch"), "val_check_interval": 20}
    limits["limit_val_batches"] = settings.get("limit_val_batches", 1)
    runner = trainer(tmp_path, [saver], enable_checkpointing=True, **limits)
    arguments: dict[str, Any] = {
        "steps_per_epoch": 45,
        "validates": settings.get("validates", True),
    }
    config = tiny_config(att_context_size=((4, 1), (2, 0)))
    if message:
        with pytest.raises(ConfigError, match=message):
            check_monitors(runner, config, **arguments)
    else:
        check_monitors(runner, config, **arguments)
