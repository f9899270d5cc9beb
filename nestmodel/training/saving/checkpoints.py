"""Checkpoints: when and where they are written, and which are kept.

A checkpoint holds the state after a whole optimizer step. It is written to a temporary file, flushed and renamed, so
that a crash never damages an existing checkpoint. Only rank 0 writes; the other ranks wait for it in their next step.
"""

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

import nestguard
from nestdata import OutputError, last_error_line
from nestdata.output import replace_file, unfinished_files
from nestmodel.run_config import CheckpointConfig
from nestmodel.training.launcher import AgreedExit
from nestmodel.training.lightning_private import dump_checkpoint
from nestmodel.training.module import NestModel
from nestmodel.training.ranks import EXIT_NOT_SAVED
from nestmodel.training.saving.best_checkpoint import BestCheckpoint
from nestmodel.training.saving.checkpoint_files import (
    LAST,
    NAMES,
    UNSOUND,
    checkpoint_name,
    find_checkpoints,
    link_last,
    write_checkpoint,
)
from nestmodel.training.step_limits import ends_step

_ABANDONED_S = 600.0
"""Age in seconds. An older file that is not complete was left by a process that was killed."""


class NotSaved(AgreedExit):
    """The run exits because its last checkpoint is not on disk."""


class Checkpoints(Checkpoint):
    """Writes a checkpoint every `every_n_steps` optimizer steps and at the end of training.

    Checkpoints that are written while steps are skipped, or while the loss is out of its range, are counted separately:
    they never replace the newest sound ones.

    If the disk is full or fails, this checkpoint is skipped with a warning and training continues. If it is the last
    one, all ranks exit with `EXIT_NOT_SAVED`. An older checkpoint is removed only after a newer one is written.
    `last.ckpt` is a link to the newest.

    With `monitor`, `best.ckpt` is the checkpoint with the lowest loss in a validation after its step. It is a second
    name of the file, and stays when the first one is removed. A resumed run goes on from the best one of the
    previous start.

    Args:
        config: When checkpoints are written, and which are kept.
    """

    def __init__(self, config: CheckpointConfig = CheckpointConfig()) -> None:
        self.config = config
        self._best = None if config.monitor is None else BestCheckpoint()
        self._saved_step = -1
        self._problem = ""  # why the checkpoint of that step is not on disk
        self._resumable: Path | None = None
        self._unsound: set[int] = set()
        """Steps whose weights may be damaged: their checkpoints do not replace the others."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Removes partial files that an interrupted run left behind."""
        self._saved_step = trainer.global_step
        if not trainer.is_global_zero:
            return
        with suppress(OSError, ValueError, TypeError):
            self._unsound = set(json.loads((self._directory_of(trainer) / UNSOUND).read_text(encoding="utf-8")))
        if trainer.ckpt_path and Path(trainer.ckpt_path).is_file():  # of the previous start, in its own directory
            self._resumable = Path(trainer.ckpt_path).resolve()
        directories = {self._directory_of(trainer).resolve(), *([self._resumable.parent] if self._resumable else [])}
        for unfinished in (path for directory in directories for path in unfinished_files(directory, NAMES)):
            with suppress(OSError):
                if time.time() - unfinished.stat().st_mtime > _ABANDONED_S:  # another run may be writing it
                    unfinished.unlink()
        if self._best is not None and self._resumable is not None:
            try:
                self._best.resume(self._resumable.parent, self._directory_of(trainer), trainer.global_step)
            except (OSError, OutputError) as error:
                _warn_of_best(error)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Keeps the checkpoint of this step as `best.ckpt` if its validation is the best so far."""
        step, directory = trainer.global_step, self._directory_of(trainer)
        is_saved = step == self._saved_step and not self._problem and trainer.state.fn == TrainerFn.FITTING
        path = directory / checkpoint_name(step)
        if self._best is not None and is_saved and trainer.is_global_zero and path.exists():
            nestguard.current().beat(nestguard.Phase.CHECKPOINT, step - 1)
            try:
                self._best.offer(path, directory, step, float(trainer.callback_metrics["val_loss"]))
            except (OSError, OutputError) as error:
                _warn_of_best(error)
            nestguard.current().beat(nestguard.Phase.LOADING, step, 0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Writes a checkpoint if one is due after this optimizer step."""
        if ends_step(trainer, batch_idx) and trainer.global_step % self.config.every_n_steps == 0:
            self.save(trainer)
            nestguard.current().beat(nestguard.Phase.LOADING, trainer.global_step, 0)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Writes the last checkpoint; raises the same errors as `save_last`."""
        self.save_last(trainer)
        nestguard.current().beat(nestguard.Phase.FINISHING)

    def save(self, trainer: pl.Trainer) -> None:
        """Writes the state after the last optimizer step, unless it is already written. Warns if the disk is full."""
        step = trainer.global_step
        if step == self._saved_step or trainer.sanity_checking or cast(Any, trainer).fast_dev_run:
            return
        self._saved_step, self._problem = step, ""
        if trainer.is_global_zero:
            nestguard.current().beat(nestguard.Phase.CHECKPOINT, step - 1)
            self._judge(trainer, self._directory_of(trainer), step)
            self._write(dump_checkpoint(trainer), self._directory_of(trainer) / checkpoint_name(step), step)

    def save_last(self, trainer: pl.Trainer) -> None:
        """Writes the state after the last optimizer step. Every rank has to call it.

        Raises:
            NotSaved: It could not be written; raised on all ranks.
            Exception: Rank 0 could not write it for another reason than the disk; the others raise NotSaved.
        """
        error: Exception | None = None
        try:
            self.save(trainer)
        except Exception as raised:  # the other ranks must not wait for this one
            error = raised
        # Some launchers end all ranks as soon as one has exited, and rank 0 may still be writing the checkpoint.
        nestguard.current().beat(nestguard.Phase.CHECKPOINT, trainer.global_step - 1)
        is_lost = trainer.strategy.broadcast(bool(self._problem) or error is not None)
        if error is not None:
            raise error
        if is_lost:
            if self._problem:
                found = f"The newest checkpoint is {self._resumable}" if self._resumable else "No step can be resumed"
                rank_zero_info(f"error: {self._problem} {found}. Make space, and start the run again with --resume.")
            raise NotSaved(EXIT_NOT_SAVED)

    def _write(self, checkpoint: dict[str, Any], path: Path, step: int) -> None:
        try:
            write_checkpoint(checkpoint, path)
        except OSError as error:
            self._problem = f"step {step}: {path} could not be written ({error.strerror or error})."
            rank_zero_warn(f"{self._problem} The previous checkpoint is intact. Make space for the next one.")
            return
        self._resumable = path
        try:
            link_last(path)
        except OSError as error:  # some file systems have no links
            with suppress(OSError):
                (path.parent / LAST).unlink()  # without it, the newest checkpoint is the one of the highest step
            rank_zero_warn(f"step {step}: {path} is written, but not the link {LAST} to it ({error.strerror}).")
        try:
            self._prune(path.parent, step)
        except OSError as error:
            rank_zero_warn(f"step {step}: {path} is written, but an older checkpoint cannot be removed ({error}).")

    def _directory_of(self, trainer: pl.Trainer) -> Path:
        if self.config.directory is not None:
            return self.config.directory
        # `trainer.log_dir` is a broadcast, which would block here because only rank 0 writes.
        logger: Any = trainer.logger
        log_dir = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        return Path(log_dir or trainer.default_root_dir) / "checkpoints"

    def _judge(self, trainer: pl.Trainer, directory: Path, step: int) -> None:
        """Notes whether a step is sound, also for later starts with the same directory."""
        unsound = self._unsound - {step} if _is_sound(trainer) else self._unsound | {step}
        if unsound != self._unsound:
            self._unsound = unsound
            with suppress(OSError):  # the checkpoint has its own warning
                directory.mkdir(parents=True, exist_ok=True)
                replace_file(directory / UNSOUND, json.dumps(sorted(unsound)).encode())

    def _prune(self, directory: Path, step: int) -> None:
        # Checkpoints of later steps belong to a run that was resumed from an earlier step. They are not removed.
        earlier = [found for found in find_checkpoints(directory) if found.step <= step]
        sound, unsound = (
            [found for found in earlier if (found.step in self._unsound) is is_unsound] for is_unsound in (False, True)
        )
        for found in (*sound[self.config.keep :], *unsound[self.config.keep :]):
            if self.config.keep_every_n_steps is None or found.step % self.config.keep_every_n_steps:
                found.path.unlink(missing_ok=True)


def savers_of(trainer: pl.Trainer) -> list[Checkpoints]:
    """Returns the callbacks of a trainer that write checkpoints."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, Checkpoints)]


def _is_sound(trainer: pl.Trainer) -> bool:
    """Returns whether the last step was made, with at most 1 nat more loss than equally likely classes have."""
    model, loss = cast(Any, trainer).lightning_module, trainer.callback_metrics.get("train_loss")
    if not isinstance(model, NestModel) or loss is None:
        return True
    return not model.is_skipping and not float(loss) > math.log(model.config.quantizer.num_classes) + 1


def _warn_of_best(error: Exception) -> None:
    rank_zero_warn(f"best.ckpt could not be written ({last_error_line(error)}). Training continues.")
