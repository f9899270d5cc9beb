"""Lightning callback that scores checkpoints without labels, on held-out audio, beside the run.

Rank 0 starts one process for each scored checkpoint, and logs the scores when they are there. Other ranks do nothing.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

import nestguard
from nestdata import last_error_line
from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError, TrainingError
from nestmodel.evaluate.feature_scores import FeatureScoreConfig, score_names
from nestmodel.evaluate.features.batch import resolve_layers
from nestmodel.evaluate.frame_units import check_sklearn
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel
from nestmodel.training.saving.checkpoint_files import checkpoint_name
from nestmodel.training.saving.checkpoints import Checkpoints
from nestmodel.training.score_process import ScoreJob, ScoreProcess
from nestmodel.training.step_limits import ends_step

_PREFIX = "val_"
_POLL_S = 1.0
"""Seconds between two looks at the process and at requests to stop. After the first, training says that it waits."""

_MAX_WAIT_S = 600.0
"""Seconds that training waits for the scores of one checkpoint, before it goes on without them."""


class FeatureScores(pl.Callback):
    """Logs scores of checkpoints that need no labels, computed on the validation corpus by a process on the CPU.

    The scores of the checkpoint of a step are logged under that step, with the prefix `val_`: see `score_features`.
    They are those of the first attention context; the others of an encoder for live speech add names such as
    `val_pnmi_layer8_70_6`.
    One checkpoint is scored at a time. If the next one is due earlier, training waits after it is written, for at most
    ten minutes; it also waits at its end. A score that a preemption or an error cuts off is computed by the start that
    resumes. Training itself stays the same, bit for bit.

    Args:
        config: What is scored.
        every_n_steps: Optimizer steps between two scored checkpoints, a multiple of `Checkpoints.every_n_steps`; by
            default, every checkpoint is scored.
        num_threads: Threads of the process.

    Raises:
        ConfigError: A number is below 1.
    """

    def __init__(
        self,
        config: FeatureScoreConfig = FeatureScoreConfig(),
        every_n_steps: int | None = None,
        num_threads: int = 1,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("num_threads", num_threads)):
            if value is not None and value < 1:
                raise ConfigError(f"FeatureScores.{name} is {value}: give at least 1.")
        self.config = config
        self.every_n_steps = every_n_steps
        self.num_threads = num_threads
        self._due: dict[int, Path] = {}
        """Steps that are not scored yet, and their checkpoints."""

        self._resumed: list[int] = []
        self._has_taken_over = False
        self._running: ScoreProcess | None = None
        self._has_warned = False

    def check(self, trainer: pl.Trainer, config: NestConfig, data: pl.LightningDataModule | None) -> list[str]:
        """Checks the settings, and returns the names of the metrics that will be logged.

        Args:
            trainer: Trainer of the run.
            config: Configuration of the model.
            data: Data of the run.

        Raises:
            ConfigError: There is no validation corpus, a layer does not exist, checkpoints are not written at the steps
                that are scored, or scikit-learn is not installed.
        """
        if not isinstance(data, NestDataModule) or data.val_dataset is None:
            raise ConfigError("FeatureScores needs held-out audio: give data.val_corpus, or leave the callback out.")
        check_sklearn("FeatureScores")
        try:
            layers = resolve_layers(self.config.layers, config.encoder.num_layers)
        except ConfigError as error:
            raise ConfigError(f"FeatureScores.config.{error}") from error
        saver = _saver(trainer)
        if saver is None:
            raise ConfigError("FeatureScores scores checkpoints: add nestmodel.Checkpoints to trainer.callbacks.")
        if self._interval(saver) % saver.every_n_steps:
            raise ConfigError(
                f"FeatureScores.every_n_steps is {self.every_n_steps}, but checkpoints are written every "
                f"{saver.every_n_steps} steps: give a multiple of Checkpoints.every_n_steps."
            )
        return [_PREFIX + name for name in score_names(layers, config.encoder.att_context_size[1:])]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Makes the checks of `check`, with its errors."""
        if stage == "fit":
            self.check(trainer, cast(NestModel, pl_module).config, cast(Any, trainer).datamodule)

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps that are not scored yet."""
        return {"due": list(self._due)} if self._due else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the steps that an earlier start has not scored."""
        due = state_dict.get("due")
        self._resumed = [step for step in due if type(step) is int and step >= 0] if isinstance(due, list) else []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Finds the checkpoints that an earlier start has not scored."""
        self._take_over(trainer)

    def _take_over(self, trainer: pl.Trainer) -> None:
        saver = _saver(trainer)
        if self._has_taken_over or not trainer.is_global_zero or trainer.ckpt_path is None or saver is None:
            return
        self._has_taken_over = True
        given, step = Path(trainer.ckpt_path).resolve(), trainer.global_step
        for due in self._resumed:
            path = given.with_name(checkpoint_name(due))
            if due < step and not path.exists():
                rank_zero_warn(f"{path} is gone, so that step {due} gets no scores without labels.")
            elif due < step:
                self._due[due] = path
        # Another callback may have written this checkpoint before this one could note that it is due.
        if step and step % self._interval(saver) == 0:
            self._due[step] = given
        saver.held.update(self._due)
        self._resumed = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Logs scores that are there, and starts to score the next checkpoint."""
        saver = _saver(trainer)
        if not trainer.is_global_zero or saver is None or cast(Any, trainer).fast_dev_run:
            return
        self._advance(trainer, saver)
        step = trainer.global_step
        if ends_step(trainer, batch_idx) and step % self._interval(saver) == 0:
            self._due[step] = saver.path_of(trainer, step)  # `saver` writes it next
            saver.held.add(step)

    def on_train_batch_start(self, trainer: pl.Trainer, _module: pl.LightningModule, _batch: Any, _index: int) -> None:
        """Waits until at most one checkpoint is not scored yet; the newest one is being written."""
        if len(self._due) > 1 and (saver := _saver(trainer)) is not None:
            self._finish(trainer, saver, self._warn_of_waiting, num_left=1)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Waits for the last scores, when all collectives of the run are over."""
        self._take_over(trainer)  # a run that resumes at its last step has no start of training
        if self._due and (saver := _saver(trainer)) is not None:
            self._finish(trainer, saver, lambda: rank_zero_info("waiting for the scores of the last checkpoint."))
            saver.prune(trainer)
            nestguard.current().beat(nestguard.Phase.FINISHING)
        self._end_process()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Ends the process. A start that resumes scores the checkpoint again."""
        self._end_process()

    def _end_process(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running = None

    def _interval(self, saver: Checkpoints) -> int:
        return self.every_n_steps or saver.every_n_steps

    def _finish(self, trainer: pl.Trainer, saver: Checkpoints, say_why: Callable[[], None], num_left: int = 0) -> None:
        """Waits until at most `num_left` checkpoints are not scored, unless this rank is asked to stop.

        Args:
            trainer: Trainer of the run.
            saver: Writes the checkpoints.
            say_why: Called if this takes longer than a moment.
            num_left: Number of checkpoints.
        """
        began, has_said = time.monotonic(), False
        while len(self._due) > num_left and not _is_stopping(trainer):
            saver.wait(trainer)
            self._advance(trainer, saver)
            if self._running is None:
                continue
            # The other ranks wait for this one, as they do while it writes a checkpoint.
            nestguard.current().beat(nestguard.Phase.CHECKPOINT, trainer.global_step - 1)
            if not self._running.wait(_POLL_S) and not has_said:
                say_why()
                has_said = True
            if not self._running.has_ended() and time.monotonic() - began > _MAX_WAIT_S:
                self._end_process()
                step = next(iter(self._due))
                rank_zero_warn(f"step {step} gets no scores without labels: they took more than {_MAX_WAIT_S:.0f} s.")
                self._drop(saver, step)
                began = time.monotonic()

    def _advance(self, trainer: pl.Trainer, saver: Checkpoints) -> None:
        """Logs scores that are there, and starts to score the next checkpoint, if it is on disk."""
        if self._running is not None and self._running.has_ended():
            running, self._running = self._running, None
            step = next(iter(self._due))
            try:
                self._log(trainer, saver, step, running.scores())
            except (TrainingError, ValueError) as error:
                rank_zero_warn(f"step {step} gets no scores without labels: {last_error_line(error)}")
            self._drop(saver, step)
        if self._running is None and self._due and not saver.is_writing:
            step, path = next(iter(self._due.items()))
            if not path.exists():  # the disk was full, of which `saver` warns
                self._drop(saver, step)
                return
            try:
                self._running = ScoreProcess(self._job(trainer, path))
            except OSError as error:
                rank_zero_warn(f"step {step} gets no scores without labels: {error}")
                self._drop(saver, step)

    def _log(self, trainer: pl.Trainer, saver: Checkpoints, step: int, scores: Mapping[str, float]) -> None:
        metrics = {_PREFIX + name: value for name, value in scores.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step - 1)  # as the metrics of a validation after that step
        saver.offer_best(trainer, step, self._due[step], metrics)

    def _drop(self, saver: Checkpoints, step: int) -> None:
        del self._due[step]
        saver.held.discard(step)

    def _job(self, trainer: pl.Trainer, path: Path) -> ScoreJob:
        data = cast(NestDataModule, cast(Any, trainer).datamodule)
        assert data.val_dataset is not None
        (corpus,) = data.val_dataset.corpus.corpora
        noise = data.noise.corpus
        return ScoreJob(
            checkpoint=str(path),
            corpus=str(corpus.path),
            noise=None if noise is None else str(noise.path),
            num_threads=self.num_threads,
            config=self.config,
        )

    def _warn_of_waiting(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        rank_zero_warn(
            "training waits for the scores of the checkpoint before: scoring takes longer than the steps between two. "
            "Raise FeatureScores.every_n_steps, lower FeatureScores.config.seconds, or name fewer layers."
        )


def _is_stopping(trainer: pl.Trainer) -> bool:
    return cast(NestModel, trainer.lightning_module).stop_requests.preempted_here


def _saver(trainer: pl.Trainer) -> Checkpoints | None:
    return next((callback for callback in trainer.checkpoint_callbacks if isinstance(callback, Checkpoints)), None)
