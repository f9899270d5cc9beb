"""A run that hangs in its second step; the section `stalls` starts it as a process of its own.

python -m benchmarks.gpu.stalled kernel|collective cuda|cpu NUM_RANKS LIMIT_S DIRECTORY CORPORA
"""

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks.gpu.context import Context, tiny_config, tiny_extent
from nestdata import AudioNoiseBatch, PlanConfig
from nestguard import StallLimits
from nestmodel import NestDataModule, NestModel, StallGuard

_HANG_S = 900.0
_STEP = 1
_CYCLES_A_S = 2_000_000_000


class Hang(pl.Callback):
    """Hangs at a step: in a kernel of the forward pass, or, on the last rank, before the sum over ranks."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._step = -1

    def on_train_batch_start(
        self, _trainer: pl.Trainer, module: pl.LightningModule, batch: AudioNoiseBatch, _index: int
    ) -> None:
        """Hangs in a kernel."""
        self._step = batch.key.step
        if self.kind == "kernel" and self._step == _STEP:
            hang(module.device)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        """Hangs before the collective of the last rank."""
        if self.kind == "collective" and self._step == _STEP and trainer.global_rank == trainer.world_size - 1:
            hang(module.device)


def hang(device: torch.device) -> None:
    """Launches a kernel that runs for a quarter of an hour; on a CPU, sleeps as long."""
    if device.type == "cuda":
        torch.cuda._sleep(_CYCLES_A_S * int(_HANG_S))
    else:
        time.sleep(_HANG_S)


def main(argv: list[str]) -> None:
    """Trains until the stall guard ends the run."""
    kind, device, num_ranks, limit_s, directory, corpora = argv
    warnings.simplefilter("ignore")
    limit = float(limit_s)
    limits = StallLimits(step_s=limit, first_step_s=max(limit, 60.0), finishing_s=limit, checkpoint_s=limit)
    context = Context(torch.device(device), tiny_extent(), Path(directory))
    trainer = context.loop_trainer(
        Path(directory) / "run",
        [StallGuard(limits), Hang(kind)],
        max_steps=4,
        enable_checkpointing=False,
        devices=int(num_ranks),
        strategy="ddp" if int(num_ranks) > 1 else "auto",
    )
    plan = PlanConfig(max_batch_seconds=20.0, microbatches_per_step=2)
    data = NestDataModule(Path(corpora) / "speech.corpus", None, None, plan, num_workers=0)
    trainer.fit(NestModel(tiny_config(), kernels="torch"), datamodule=data)


if __name__ == "__main__":
    main(sys.argv[1:])
