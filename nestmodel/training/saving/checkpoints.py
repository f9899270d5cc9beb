"""Checkpoints: when and where they are written, and which are kept.

A checkpoint holds the state after a whole optimizer step. It is written to a temporary file, flushed and renamed, so
that a crash never damages an existing checkpoint. Only rank 0 writes: the training thread copies the state, and another
thread writes the copy while training continues. The other ranks do not wait for it.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

import nestguard
from nestdata import OutputError, last_error_line
from nestmodel.out_of_memory import is_out_of_memory
from nestmodel.run_config import CheckpointConfig
from nestmodel.training.lightning_private import dump_checkpoint
from nestmodel.training.saving.best_checkpoint import BestCheckpoint
from nestmodel.training.saving.checkpoint_files import (
    PARTIAL,
    FoundCheckpoint,
    checkpoint_name,
    find_checkpoints,
    link_last,
    write_checkpoint,
)
from nestmodel.training.saving.state_copy import StateCopier, StateCopy
from nestmodel.training.starting.launcher import destroy_process_group_at_exit
from nestmodel.training.starting.origin import is_started_by_lightning
from nestmodel.training.step_limits import ends_step
from nestmodel.training.stopping.exit_codes import EXIT_NOT_SAVED

_SILENT_WAIT_S = 1.0
"""Seconds that training waits for a checkpoint before it says so."""

_EXCEPTION_WAIT_S = 300.0
"""Seconds that a failed run waits for its last checkpoint, before the cause of the failure is reported."""


class NotSaved(SystemExit):
    """The run exits because its last checkpoint is not on disk."""


class _Outcome(NamedTuple):
    """Result of writing a checkpoint."""

    is_written: bool
    problem: str
    """The error of the disk; empty on success."""


class _Writing(NamedTuple):
    """A checkpoint that a thread writes."""

    step: int
    path: Path
    outcome: Future[_Outcome]
    """Holds an exception if the checkpoint could not be written for another reason than the disk."""


def _say_path(writing: _Writing) -> None:
    rank_zero_info(f"waiting until {writing.path} is written.")


class Checkpoints(Checkpoint):
    """Writes a checkpoint every `every_n_steps` optimizer steps and at the end of training.

    Training stands still while the state is copied, not while the copy is written. One checkpoint is written at a time:
    if the next one is due earlier, training waits. It also waits at its end, on preemption and after an error.

    If the disk is full or fails, this checkpoint is skipped with a warning and training continues. If it is the last
    one, all ranks exit with `EXIT_NOT_SAVED`. An older checkpoint is removed only after a newer one is written.
    `last.ckpt` is a link to the newest.

    With `monitor`, `best.ckpt` is the checkpoint with the best value of that metric in a validation after its step. It
    is a second name of the file, and stays when the first one is removed. A resumed run goes on from the best one
    of the start before.

    Args:
        config: When checkpoints are written, and which are kept.
    """

    def __init__(self, config: CheckpointConfig = CheckpointConfig()) -> None:
        self.config = config
        self._best = None if config.monitor is None else BestCheckpoint(config.monitor, config.mode)
        self._saved_step = -1
        self._copier = StateCopier()
        self._writing: _Writing | None = None
        self._resumable: FoundCheckpoint | None = None
        self._problem = ""  # of the last write, until a warning has said so
        self._failed: tuple[int, str] | None = None  # step and problem of the last write, if it failed
        self._warned_of: set[str] = set()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written, by a thread of rank 0."""
        return self._writing is not None and not self._writing.outcome.done()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Removes partial files that an interrupted run left behind."""
        self._saved_step = trainer.global_step
        if not trainer.is_global_zero:
            return
        directories = {self._directory_of(trainer).resolve()}
        if trainer.ckpt_path and Path(trainer.ckpt_path).is_file():  # of the start before, in a directory of its own
            directories.add(Path(trainer.ckpt_path).resolve().parent)
            self._resumable = FoundCheckpoint(trainer.global_step, Path(trainer.ckpt_path))
        for directory in directories:
            for unfinished in directory.glob(f"*.ckpt{PARTIAL}"):
                unfinished.unlink(missing_ok=True)
        if self._best is not None and trainer.ckpt_path:
            before = Path(trainer.ckpt_path).resolve().parent
            try:
                self._best.resume(before, self._directory_of(trainer), trainer.global_step)
            except (OSError, OutputError) as error:
                self._warn_of_best(error)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Keeps the checkpoint of this step if its validation is the best so far."""
        step = trainer.global_step
        is_saved = step == self._saved_step and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self._best is not None and is_saved and trainer.is_global_zero:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._offer_best(trainer, step, metrics)
            nestguard.current().beat(nestguard.Phase.LOADING, step, 0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Starts to write a checkpoint if one is due after this optimizer step, and reports the one before."""
        if self._writing is not None and self._writing.outcome.done():
            self._report()
            self._warn_of_skipped()
        if ends_step(trainer, batch_idx) and trainer.global_step % self.config.every_n_steps == 0:
            self._wait(trainer, self._warn_of_slow_disk)
            self.save(trainer)
            nestguard.current().beat(nestguard.Phase.LOADING, trainer.global_step, 0)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Writes the last checkpoint; errors are those of `save_last`."""
        self.save_last(trainer)
        self._copier.release()
        nestguard.current().beat(nestguard.Phase.FINISHING)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Waits up to five minutes for the checkpoint that is being written; its failure is a warning."""
        if self._writing is None:
            return
        name = type(exception).__name__
        if not self._writing.outcome.done():
            rank_zero_info(f"{name}: {last_error_line(exception)}; waiting until {self._writing.path} is written.")
            nestguard.current().beat(nestguard.Phase.CHECKPOINT, trainer.global_step - 1)
            if not wait([self._writing.outcome], _EXCEPTION_WAIT_S).done:
                rank_zero_warn(f"{self._writing.path} is not written after {_EXCEPTION_WAIT_S:g} s and is given up.")
                return
        try:
            self._report()
        except Exception as error:
            self._problem = f"a checkpoint could not be written ({type(error).__name__}: {error})."
        if self._problem:
            rank_zero_warn(self._problem)

    def save(self, trainer: pl.Trainer) -> None:
        """Starts to write the state after the last optimizer step, unless it is already written; see `wait`.

        Raises:
            Exception: The checkpoint before could not be written, for another reason than the disk.
        """
        step = trainer.global_step
        is_fast_dev_run = cast(Any, trainer).fast_dev_run
        if step == self._saved_step or trainer.sanity_checking or is_fast_dev_run:
            return
        self._saved_step = step
        if not trainer.is_global_zero:
            return
        nestguard.current().beat(nestguard.Phase.CHECKPOINT, step - 1)
        self._wait(trainer)
        self._warn_of_skipped()
        self._start(trainer, step)

    def save_last(self, trainer: pl.Trainer) -> None:
        """Writes the state after the last optimizer step and waits until it is on disk. Every rank has to call it.

        Raises:
            NotSaved: It could not be written; raised on all ranks.
            Exception: It could not be written for another reason than the disk.
        """
        error: Exception | None = None
        try:
            self.save(trainer)
            self._wait(trainer)
        except Exception as raised:  # the other ranks must not wait for this one
            error = raised
        is_lost = self._failed is not None and self._failed[0] == trainer.global_step
        # Some launchers end all ranks as soon as one has exited, and rank 0 may still be writing the checkpoint.
        nestguard.current().beat(nestguard.Phase.CHECKPOINT, trainer.global_step - 1)
        is_lost = trainer.strategy.broadcast(is_lost or error is not None)
        if error is not None:
            raise error
        if is_lost:
            destroy_process_group_at_exit()
            if self._failed is not None:
                found = self._resumable
                last = (
                    f"The last step that can be resumed is {found.step} ({found.path})"
                    if found
                    else "No step can be resumed"
                )
                rank_zero_info(
                    f"error: {self._failed[1]} {last}. Make space, and start the run again with the same command."
                )
            # Lightning kills the rank that started the others as soon as one of them exits with another code than 0.
            raise NotSaved(0 if is_started_by_lightning() else EXIT_NOT_SAVED)

    def _offer_best(self, trainer: pl.Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the checkpoint of a step as `best.ckpt` if its monitored metric is the best so far, on rank 0."""
        if self._best is None or self.config.monitor is None or self.config.monitor not in metrics:
            return
        self._wait(trainer)
        try:
            if (path := self._path_of(trainer, step)).exists():
                self._best.offer(path, self._directory_of(trainer), step, metrics[self.config.monitor])
        except (OSError, OutputError) as error:
            self._warn_of_best(error)

    def _path_of(self, trainer: pl.Trainer, step: int) -> Path:
        return self._directory_of(trainer) / checkpoint_name(step)

    def _wait(self, trainer: pl.Trainer, say_why: Callable[[_Writing], None] = _say_path) -> None:
        """Waits until no checkpoint is being written.

        Args:
            trainer: Of the run.
            say_why: Called if this takes longer than a moment; by default, the path is named.

        Raises:
            Exception: The last one could not be written, for another reason than the disk.
        """
        if self._writing is None:
            return
        outcome = self._writing.outcome
        if not outcome.done():
            nestguard.current().beat(nestguard.Phase.CHECKPOINT, trainer.global_step - 1)
            if not wait([outcome], _SILENT_WAIT_S).done:
                say_why(self._writing)
                wait([outcome])
        self._report()

    def _start(self, trainer: pl.Trainer, step: int) -> None:
        path = self._path_of(trainer, step)
        checkpoint = dump_checkpoint(trainer)
        copied = self._copy(checkpoint, step)
        write = partial(self._write, copied or StateCopy(checkpoint, ()), path, step)
        self._writing = _Writing(step, path, _run_in_thread(write))
        if copied is None:
            self._wait(trainer)
            self._warn_of_skipped()

    def _copy(self, checkpoint: dict[str, Any], step: int) -> StateCopy | None:
        """Returns a copy of a checkpoint, or None if there is no memory for it or was none before."""
        if "memory" in self._warned_of:
            return None
        try:
            return self._copier.copy(checkpoint)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._copier.release()
        self._warn_once(
            "memory",
            f"step {step}: there is no memory for a copy of the model and the optimizer, so training waits while "
            "checkpoints are written.",
        )
        return None

    def _write(self, copy: StateCopy, path: Path, step: int) -> _Outcome:
        """Writes a checkpoint and removes old ones. Runs in the thread.

        Nothing here writes a heartbeat or a log: both belong to the training thread.
        """
        copy.wait()
        try:
            write_checkpoint(copy.state, path)
            link_last(path)
        except OSError as error:
            return _Outcome(False, f"step {step}: {path} could not be written ({error.strerror or error}).")
        try:
            self._prune(path.parent, step)
        except OSError as error:
            return _Outcome(
                True, f"step {step}: {path} is written, but an older checkpoint cannot be removed ({error})."
            )
        return _Outcome(True, "")

    def _report(self) -> None:
        """Records the result of the last write; raises if it failed for another reason than the disk."""
        assert self._writing is not None
        writing, self._writing = self._writing, None
        is_written, problem = writing.outcome.result()
        self._problem = "" if is_written else problem
        self._failed = None if is_written else (writing.step, problem)
        if is_written:
            self._resumable = FoundCheckpoint(writing.step, writing.path)
            if problem:
                rank_zero_warn(problem)

    def _warn_of_skipped(self) -> None:
        """Warns once of a checkpoint that could not be written while training continues."""
        if self._problem:
            rank_zero_warn(
                f"{self._problem} Training continues, and the previous checkpoint is intact. Free some space: a "
                f"checkpoint is due every {self.config.every_n_steps} steps."
            )
            self._problem = ""

    def _warn_of_slow_disk(self, writing: _Writing) -> None:
        self._warn_once(
            "disk",
            f"training waits until {writing.path} is written: the disk is slower than training. Raise "
            f"checkpoints.every_n_steps (it is {self.config.every_n_steps}), or write to a faster disk.",
        )

    def _warn_of_best(self, error: Exception) -> None:
        self._warn_once("best", f"best.ckpt could not be written ({last_error_line(error)}). Training continues.")

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned_of:
            self._warned_of.add(topic)
            rank_zero_warn(message)

    def _directory_of(self, trainer: pl.Trainer) -> Path:
        if self.config.directory is not None:
            return self.config.directory
        # `trainer.log_dir` is a broadcast, which would block here because only rank 0 writes.
        logger: Any = trainer.logger
        log_dir = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        return Path(log_dir or trainer.default_root_dir) / "checkpoints"

    def _prune(self, directory: Path, step: int) -> None:
        # Checkpoints of later steps belong to a run that was resumed from an earlier step. They are not removed.
        for found in [checkpoint for checkpoint in find_checkpoints(directory) if checkpoint.step <= step][
            self.config.keep :
        ]:
            is_chosen = self.config.keep_every_n_steps is not None and found.step % self.config.keep_every_n_steps == 0
            if not is_chosen:
                found.path.unlink(missing_ok=True)


def _run_in_thread(write: Callable[[], _Outcome]) -> Future[_Outcome]:
    """Runs a function in a thread, for which the interpreter waits before it exits.

    Loader workers may be forked meanwhile, and inherit every lock as it is at that moment. The thread must hold none
    that they need. The locks of Python, of its logging and of malloc are made for forks; those of imports are not, so
    everything that the function imports has to be imported before.
    """
    future: Future[_Outcome] = Future()

    def run() -> None:
        try:
            future.set_result(write())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint").start()
    return future
