from pathlib import Path
from typing import Any

import pytest

from nestmodel import CheckpointConfig, Checkpoints, ConfigError
from nestmodel.training.starting.run_checks import check_best
from tests.training import trainer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validates": False}, "there is no validation: give data.val_corpus"),
        ({"limit_val_batches": 0}, "leave limit_val_batches as it is"),
        ({"every_n_steps": 7}, "validations come after steps without a checkpoint"),
        ({"check_val_every_n_epoch": 1}, "validations come after steps without a checkpoint"),
        ({}, ""),
        ({"every_n_steps": 7, "monitor": None}, ""),
    ],
)
def test_the_best_checkpoint_needs_validations_at_steps_of_checkpoints(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    config = CheckpointConfig(
        every_n_steps=settings.get("every_n_steps", 10), monitor=settings.get("monitor", "val_loss")
    )
    limits = {"check_val_every_n_epoch": settings.get("check_val_every_n_epoch"), "val_check_interval": 20}
    limits["limit_val_batches"] = settings.get("limit_val_batches", 1)
    runner = trainer(tmp_path, [Checkpoints(config)], enable_checkpointing=True, **limits)
    arguments = {"steps_per_epoch": 45, "validates": settings.get("validates", True)}
    if message:
        with pytest.raises(ConfigError, match=message):
            check_best(runner, **arguments)
    else:
        check_best(runner, **arguments)
