"""Checkpoints that cannot be lost: written beside their target, flushed, renamed; found again by themselves.

Owns where they lie, when they are written and which are removed. A checkpoint is of a whole optimizer step. Only rank
0 writes, and none waits for it, so that a slow disk holds up nobody but at the next step.
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
from nestdata import flush_to_disk
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
    """Writes a checkpoint every so many optimizer steps and at the end of training.

    A disk that is full, or fails, costs this one checkpoint and a warning; training goes on, and no older one is
    removed before a newer one is safe. `last.ckpt` is a link to the newest.

    Args:
        every_n_steps: Optimizer steps between two checkpoints.
        keep: Newest ones that are kept.
        keep_every_n_steps: Those of whole multiples of so many steps are kept for good; None keeps none of them.
        directory: Where they go; by default `checkpoints` in the directory of the run's logs.

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
        """Removes what an earlier run left half-written."""
        self._saved_step = trainer.global_step
        if trainer.is_global_zero and self._place(trainer).is_dir():
            for partial in self._place(trainer).glob(f"*{_PARTIAL}"):
                partial.unlink(missing_ok=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Writes one where it is due."""
        if ends_step(trainer, batch_idx) and trainer.global_step % self.every_n_steps == 0:
            self.save(trainer)
            nestguard.current().beat(nestguard.Phase.LOADING, trainer.global_step, 0)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Writes the last one."""
        self.save(trainer)
        nestguard.current().beat(nestguard.Phase.FINISHING)

    def save(self, trainer: pl.Trainer) -> None:
        """Writes the state at the optimizer step that was just made, unless that is written already."""
        step = trainer.global_step
        is_trying = cast(Any, trainer).fast_dev_run
        if step == self._saved_step or trainer.sanity_checking or is_trying:
            return
        self._saved_step = step
        if not trainer.is_global_zero:
            return
        nestguard.current().beat(nestguard.Phase.CHECKPOINT, step - 1)
        self._write(trainer, step)

    def _write(self, trainer: pl.Trainer, step: int) -> None:
        directory = self._place(trainer)
        path = directory / f"step_{step:08d}.ckpt"
        checkpoint = dump_checkpoint(trainer)
        try:
            write_checkpoint(checkpoint, path)
            _point_to(path)
        except OSError as error:
            rank_zero_warn(
                f"step {step}: {path} could not be written ({error.strerror or error}). Training goes on; the "
                f"checkpoint before is whole. Make room: the next is due at step {step + self.every_n_steps}."
            )
            return
        self._prune(directory, step)

    def _place(self, trainer: pl.Trainer) -> Path:
        if self.directory is not None:
            return self.directory
        # Not `trainer.log_dir`, which is a broadcast, and rank 0 is alone here.
        logger: Any = trainer.logger
        log_dir = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        return Path(log_dir or trainer.default_root_dir) / "checkpoints"

    def _prune(self, directory: Path, step: int) -> None:
        # Those of later steps are of a run that this one has gone back from: not this one's to count.
        for found in [one for one in find_checkpoints(directory) if one.step <= step][self.keep :]:
            if self.keep_every_n_steps is None or found.step % self.keep_every_n_steps:
                found.path.unlink(missing_ok=True)


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint so that at every moment either the whole file is there or none.

    Raises:
        OSError: It could not be written; nothing of it is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + _PARTIAL)
    refused: list[OSError] = []
    try:
        with partial.open("wb") as file:
            torch.save(checkpoint, cast(IO[bytes], _Noting(file, refused)))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        flush_to_disk(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if refused and isinstance(error, RuntimeError):  # with which torch's writer hides what the file said
            raise refused[0] from error
        raise


class _Noting(io.RawIOBase):
    """A file that keeps the errors of its writes."""

    def __init__(self, file: BinaryIO, refused: list[OSError]) -> None:
        self._file = file
        self._refused = refused

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self._refused.append(error)
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
    """Returns the checkpoint that was written last below a directory and is not damaged, or None.

    That is the one of the latest run, and there the one that `last.ckpt` names: a run may have gone back to an earlier
    step than another has reached.

    Args:
        root: `trainer.default_root_dir`, which holds `version_N/checkpoints`.
    """
    versions = sorted(root.glob("version_*/checkpoints"), key=_version, reverse=True)
    for place in [root / "checkpoints", *versions]:
        last = (place / LAST).resolve().name
        for _, path in sorted(find_checkpoints(place), key=lambda found: found.path.name != last):
            if is_zipfile(path):
                return path
            rank_zero_warn(f"{path} is damaged and left out; the one before it is used.")
    return None


def _version(place: Path) -> int:
    number = place.parent.name.removeprefix("version_")
    return int(number) if number.isdecimal() else -1


def _point_to(path: Path) -> None:
    link = path.with_name(LAST + _PARTIAL)
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    link.replace(path.with_name(LAST))
