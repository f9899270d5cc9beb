"""`Run`: a run that is built and checked, and has not started."""

from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl

from nestmodel.run_config import RunConfig
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel


@dataclass(frozen=True)
class Run:
    """A run that is built and checked, and has not started."""

    config: RunConfig
    model: NestModel
    data: NestDataModule
    trainer: pl.Trainer

    ckpt_path: Path | None
    """The checkpoint that the run resumes from."""

    first_step: int
    """Optimizer steps that it has made."""
