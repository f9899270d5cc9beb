"""Callback that stops the ranks of a run at a known place, where a test can disturb them."""

import time
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl

from nestguard import current
from nestmodel import NestModel

PATIENCE_S = 240


class Pause(pl.Callback):
    """Waits before a step or a validation until the file `go` exists or this rank is preempted.

    Args:
        directory: Where the file `go` is expected, and a file `reached-RANK` is written.
        step: Optimizer step, counted from 0.
        validation: Waits in the first validation instead.
    """

    def __init__(self, directory: str, step: int, validation: bool = False) -> None:
        self.directory, self.step, self.validation = Path(directory), step, validation

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if not self.validation and trainer.global_step == self.step:
            self._wait(trainer, cast(NestModel, module))

    def on_validation_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self.validation:
            self._wait(trainer, cast(NestModel, module))

    def _wait(self, trainer: pl.Trainer, model: NestModel) -> None:
        (self.directory / f"reached-{trainer.global_rank}").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not ((self.directory / "go").exists() or model.stop_requests.preempted_here):
            assert time.monotonic() < deadline, "the test did not go on"
            current().refresh()
            time.sleep(0.05)
