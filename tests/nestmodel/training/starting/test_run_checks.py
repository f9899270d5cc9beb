from pathlib import Path
from typing import Any

import pytest

from nestmodel import CheckpointConfig, Checkpoints, ConfigError
from nestmodel.training.starting.run_checks import check_best
from tests.training import trainer


@pytest.mark.parametrize(
    ("every_n_steps", "limits", "validates", "message"),
    [
        (10, {}, False, "there is no validation: give data.val_corpus"),
        (10, {"limit_val_batches": 0}, True, "leave limit_val_batches as it is"),
        (7, {}, True, "validations come after steps without a checkpoint"),
        (10, {"check_val_every_n_epoch": 1}, True, "validations come after steps without a checkpoint"),
    ],
)
def test_the_best_checkpoint_needs_validations_at_steps_of_checkpoints(
    tmp_path: Path, every_n_steps: int, limits: dict[str, Any], validates: bool, message: str
) -> None:
    def check(monitor: str | None, every_n_steps: int, limits: dict[str, Any]) -> None:
        saver = Checkpoints(CheckpointConfig(every_n_steps=every_n_steps, monitor=monitor))
        settings = {"check_val_every_n_epoch": None, "val_check_interval": 20, "limit_val_batches": 1, **limits}
        check_best(
            trainer(tmp_path, [saver], enable_checkpointing=True, **settings), steps_per_epoch=45, validates=validates
        )

    with pytest.raises(ConfigError, match=message):
        check("val_loss", every_n_steps, limits)
    check(None, every_n_steps, limits)
    if validates:
        check("val_loss", 10, {})
