"""Holds the ranks of a run before a step, so that a test can disturb the network at a known moment."""

import time
from pathlib import Path

import pytorch_lightning as pl

from nestguard import current

LONGEST_WAIT_S = 120


class Gate(pl.Callback):
    """Waits before a step until a file exists. Each rank writes `reached-RANK` beside the file when it begins to wait.

    Args:
        path: The file.
        step: Optimizer steps that are made before the wait.
    """

    def __init__(self, path: str, step: int) -> None:
        self.path = Path(path)
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, _module: object, _batch: object, _index: int) -> None:
        if trainer.global_step != self.step or self.path.exists():
            return
        self.path.with_name(f"reached-{trainer.global_rank}").touch()
        end_s = time.monotonic() + LONGEST_WAIT_S
        while not self.path.exists():
            assert time.monotonic() < end_s, f"{self.path} was not written"
            current().refresh()
            time.sleep(0.05)
