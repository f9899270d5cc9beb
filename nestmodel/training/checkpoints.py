"""Checkpoints: when and where they are written, which are kept, and how the newest one is found.

A checkpoint holds the state after a whole optimizer step. It is written to a temporary file, flushed and renamed, so
that a crash never damages an existing checkpoint. Only rank 0 writes. The other ranks do not wait for it until the
next step, so that a slow disk delays training as little as possible.
"""

import io
import os
import re
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast
from zipfile import is_zipfile

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.utilities import rank_zero_warn

import nestguard
from nestdata.output import flush_to_disk
from nestmodel.errors import ConfigError
from nestmodel.training.lightning_private import dump_checkpoint
from nestmodel.training.step_limits import ends_step

_NAME = re.compile(r"step_(\d+)\.ckpt")
_PARTIAL = ".partial"
LAST = "last.ckpt"


class FoundCheckpoint(NamedTuple):
    """A checkpoint on disk."""

    step: int
    path: Path


class Checkpoints(Checkpoint):
    """Writes a checkpoint every `every_n_steps` optimizer steps and at the end of training.

    If the disk is full or fails, this checkpoint is skipped with a warning and training continues. An older checkpoint
    is removed only after a newer one is written. `last.ckpt` is a link to the newest.

    Args:
        every_n_steps: Optimizer steps between two checkpoints.
        keep: Number of newest checkpoints to keep.
        keep_every_n_steps: Checkpoints at multiples of this number of steps are never removed; None removes them too.
        directory: Where checkpoints are written; by default `checkpoints` in the log directory of the run.

    Raises:
        ConfigError: A number is below 1.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        keep: int = 2,
        keep_every_n_steps: int | None = None,
        directory: Path | None = None,
    ) -> None:
        for name, value in (
            ("every_n_steps", every_n_steps),
            ("keep", keep),
            ("keep_every_n_steps", keep_every_n_steps),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"Checkpoints.{name} is {value}: give at least 1.")
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.keep_every_n_steps = keep_every_n_steps
        self.directory = directory
        self._saved_step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Removes partial files that an interrupted run left behind."""
        self._saved_step = trainer.global_step
        if trainer.is_global_zero and self._directory_of(trainer).is_dir():
            for partial in self._directory_of(trainer).glob(f"*{_PARTIAL}"):
                partial.unlink(missing_ok=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Writes a checkpoint if one is due after this optimizer step."""
        if ends_step(trainer, batch_idx) and trainer.global_step % self.every_n_steps == 0:
            self.save(trainer)
            nestguard.current().beat(nestguard.Phase.LOADING, trainer.global_step, 0)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Writes the last checkpoint."""
        self.save(trainer)
        nestguard.current().beat(nestguard.Phase.FINISHING)

    def save(self, trainer: pl.Trainer) -> None:
        """Writes the state after the last optimizer step, unless it is already written."""
        step = trainer.global_step
        is_fast_dev_run = cast(Any, trainer).fast_dev_run
        if step == self._saved_step or trainer.sanity_checking or is_fast_dev_run:
            return
        self._saved_step = step
        if not trainer.is_global_zero:
            return
        nestguard.current().beat(nestguard.Phase.CHECKPOINT, step - 1)
        self._write(trainer, step)

    def _write(self, trainer: pl.Trainer, step: int) -> None:
        directory = self._directory_of(trainer)
        path = directory / f"step_{step:08d}.ckpt"
        checkpoint = dump_checkpoint(trainer)
        try:
            write_checkpoint(checkpoint, path)
            _link_last(path)
        except OSError as error:
            rank_zero_warn(
                f"step {step}: {path} could not be written ({error.strerror or error}). Training continues, and the "
                f"previous checkpoint is intact. Free some space: the next checkpoint is due at step "
                f"{step + self.every_n_steps}."
            )
            return
        self._prune(directory, step)

    def _directory_of(self, trainer: pl.Trainer) -> Path:
        if self.directory is not None:
            return self.directory
        # `trainer.log_dir` is a broadcast, which would block here because only rank 0 writes.
        logger: Any = trainer.logger
        log_dir = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        return Path(log_dir or trainer.default_root_dir) / "checkpoints"

    def _prune(self, directory: Path, step: int) -> None:
        # Checkpoints of later steps belong to a run that was resumed from an earlier step. They are not removed.
        for found in [one for one in find_checkpoints(directory) if one.step <= step][self.keep :]:
            if self.keep_every_n_steps is None or found.step % self.keep_every_n_steps:
                found.path.unlink(missing_ok=True)


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint atomically: at any moment the file is either complete or absent.

    Raises:
        OSError: The file could not be written; the partial file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + _PARTIAL)
    errors: list[OSError] = []
    try:
        with partial.open("wb") as file:
            torch.save(checkpoint, cast(IO[bytes], _ErrorRecordingFile(file, errors)))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        flush_to_disk(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if errors and isinstance(error, RuntimeError):  # torch's writer raises it instead of the file's error
            raise errors[0] from error
        raise


class _ErrorRecordingFile(io.RawIOBase):
    """A writable file that appends the errors of its writes to a list."""

    def __init__(self, file: BinaryIO, errors: list[OSError]) -> None:
        self._file = file
        self._errors = errors

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self._errors.append(error)
            raise


def find_checkpoints(directory: Path) -> list[FoundCheckpoint]:
    """Returns the checkpoints in a directory, newest step first."""
    found = [
        FoundCheckpoint(int(match[1]), path)
        for path in (directory.iterdir() if directory.is_dir() else ())
        if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(found, reverse=True)


def newest_checkpoint(root: Path) -> Path | None:
    """Returns the most recently written undamaged checkpoint below a directory, or None.

    This is the checkpoint of the latest run that `last.ckpt` links to. It need not be the one with the highest step,
    since a run may be resumed from an earlier step. Damaged checkpoints are skipped with a warning.

    Args:
        root: `trainer.default_root_dir`, which holds `version_N/checkpoints`.
    """
    versions = sorted(root.glob("version_*/checkpoints"), key=_version, reverse=True)
    for directory in [root / "checkpoints", *versions]:
        last = (directory / LAST).resolve().name
        for _, path in sorted(find_checkpoints(directory), key=lambda found: found.path.name != last):
            if is_zipfile(path):
                return path
            rank_zero_warn(f"{path} is damaged and is skipped; the previous checkpoint is used.")
    return None


def _version(directory: Path) -> int:
    number = directory.parent.name.removeprefix("version_")
    return int(number) if number.isdecimal() else -1


def _link_last(path: Path) -> None:
    link = path.with_name(LAST + _PARTIAL)
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    link.replace(path.with_name(LAST))
