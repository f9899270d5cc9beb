"""Progress of training: a callback that reads where the run stands, and shows it on stderr.

The state is read at the end of an optimizer step, once per interval of the renderer, and when the run begins to do
something else.
"""

import sys
import time
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import pytorch_lightning as pl

from nestmodel.training.run_state import (
    Activity,
    RunClock,
    RunState,
    Scores,
    format_duration,
    mean_scores,
    read_state,
    scores_of,
)
from nestmodel.training.step_limits import ends_step

_OUTPUT_MAY_BE_GONE = suppress(OSError)
"""Ignores a closed stderr: Ctrl-C also ends the `tee` of a pipe, and a checkpoint must still be written."""


@runtime_checkable
class Renderer(Protocol):
    """Shows where a run stands."""

    seconds_between: float
    """Minimum number of seconds between two states of the same activity."""

    def start(self) -> None:
        """Prepares the output. Called before the first state."""

    def show(self, state: RunState) -> None:
        """Shows a state."""

    def stop(self) -> None:
        """Ends the output; further calls do nothing."""


class PlainLines:
    """Shows one line per interval and per validation, for output that is not a terminal.

    Args:
        seconds_between: Minimum number of seconds between two lines.
    """

    def __init__(self, seconds_between: float = 10.0) -> None:
        self.seconds_between = seconds_between
        self._step = self._validated_step = -1

    def start(self) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""

    def show(self, state: RunState) -> None:
        """Prints a line about a new validation, or about a step that has no line yet."""
        if state.validated_step is not None and state.validated_step != self._validated_step:
            self._step = self._validated_step = state.validated_step
            print(_validation_line(state), file=sys.stderr, flush=True)  # noqa: T201
        elif state.microbatch is not None or (state.activity in ("training", "finished") and state.step != self._step):
            self._step = state.step if state.microbatch is None else self._step
            print(progress_line(state), file=sys.stderr, flush=True)  # noqa: T201


class Progress(pl.Callback):
    """Shows the progress of `fit`, and the result of `validate`, on stderr of rank 0.

    Args:
        renderer: Shows the states; by default one line every ten seconds.
    """

    def __init__(self, renderer: Renderer | None = None) -> None:
        self._renderer = renderer or PlainLines()
        self._clock = RunClock(0)
        self._recent: list[Scores] = []  # scores of the steps since the last state, or of the state itself
        self._is_recent_shown = False
        self._step_ended_s = time.monotonic()
        self._validated_step: int | None = None
        self._shown_s: float | None = None
        self._is_shown = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Starts the output, and the clock for the time that is left."""
        self._clock, self._recent = RunClock(trainer.global_step), []
        self._step_ended_s = time.monotonic()
        self._is_shown = trainer.is_global_zero
        if self._is_shown:
            self._renderer.start()
            self._show(trainer, "starting")
            self._shown_s = None  # the first step is shown

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Shows the state after an optimizer step, or within a long one, if the interval has passed."""
        if not self._is_shown:
            return
        if ends_step(trainer, batch_idx):
            self._clock.count(trainer.global_step)
            if (scores := scores_of(trainer.callback_metrics, "train")) is not None:
                self._recent = [scores] if self._is_recent_shown else [*self._recent, scores]
                self._is_recent_shown = False
            self._step_ended_s = time.monotonic()
            self._show_if_due(trainer, "training")
        elif time.monotonic() - self._step_ended_s > self._renderer.seconds_between:
            number = trainer.accumulate_grad_batches
            self._show_if_due(trainer, "training", microbatch=(batch_idx % number + 1, number))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Shows that a validation begins."""
        self._show(trainer, "validating")

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Shows the state if the interval has passed."""
        self._show_if_due(trainer, "validating")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Shows the metrics of the validation."""
        if trainer.sanity_checking:
            return
        self._validated_step = trainer.global_step
        if self._is_shown:
            self._show(trainer, "training")
        elif trainer.is_global_zero:  # `validate`, which has no other progress to show
            state = read_state(trainer, self._clock, "validating", validated_step=self._validated_step)
            with _OUTPUT_MAY_BE_GONE:
                print(_validation_line(state), file=sys.stderr, flush=True)  # noqa: T201

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Shows that a checkpoint is being written."""
        self._show(trainer, "writing a checkpoint")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Shows the last step and ends the output."""
        self._show(trainer, "finished")
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Ends the output, so that the error follows it."""
        self._stop()

    def _stop(self) -> None:
        if self._is_shown:
            with _OUTPUT_MAY_BE_GONE:
                self._renderer.stop()
        self._is_shown = False

    def _show_if_due(self, trainer: pl.Trainer, activity: Activity, microbatch: tuple[int, int] | None = None) -> None:
        if self._shown_s is None or time.monotonic() - self._shown_s > self._renderer.seconds_between:
            self._show(trainer, activity, microbatch)
            if microbatch is None and activity == "training":
                self._is_recent_shown = True

    def _show(self, trainer: pl.Trainer, activity: Activity, microbatch: tuple[int, int] | None = None) -> None:
        if not self._is_shown:
            return
        state = read_state(
            trainer,
            self._clock,
            activity,
            validated_step=self._validated_step,
            training=mean_scores(self._recent) if self._recent else None,
            microbatch=microbatch,
        )
        with _OUTPUT_MAY_BE_GONE:
            self._renderer.show(state)
        self._shown_s = time.monotonic()


def progress_line(state: RunState) -> str:
    """Returns a state in one line, without what is not known yet."""
    return ", ".join([step_of(state), *time_left(state), *training_facts(state)])


def step_of(state: RunState) -> str:
    """Returns the step as text, such as `step 300 of 80,000`."""
    step = f"step {state.step:,}" if state.num_steps is None else f"step {state.step:,} of {state.num_steps:,}"
    if state.microbatch is None:
        return step
    done, number = state.microbatch
    return f"{step}, next: microbatch {done} of {number}"


def time_left(state: RunState) -> list[str]:
    """Returns the time that is left, if it is known."""
    is_known = state.seconds_left is not None and state.activity != "finished"
    return [f"ETA {format_duration(state.seconds_left or 0.0)}"] if is_known else []


def training_facts(state: RunState) -> list[str]:
    """Returns what is known about the steps."""
    facts, metrics = [] if state.training is None else score_facts(state.training), state.metrics
    if {"audio_s_per_s", "data_wait"} <= metrics.keys():
        facts += [f"{metrics['audio_s_per_s']:,.0f} s of audio/s", f"{100 * metrics['data_wait']:.0f} % waiting"]
    if "mfu" in metrics:
        facts.append(f"{100 * metrics['mfu']:.1f} % MFU")
    if metrics.get("memory_gb"):
        facts.append(f"{metrics['memory_gb']:.1f} GB")
    if metrics.get("steps_skipped"):
        facts.append(f"{metrics['steps_skipped']:,.0f} steps skipped")
    return facts


def score_facts(scores: Scores) -> list[str]:
    """Returns loss and accuracy. Below the entropy, a model knows more than the frequency of each token."""
    entropy = f"entropy {scores.token_entropy:.3f}"
    compared = entropy if scores.loss < scores.token_entropy else f"above {entropy}: no better than chance"
    return [f"loss {scores.loss:.3f} ({compared})", f"masked accuracy {100 * scores.accuracy:.1f} %"]


def _validation_line(state: RunState) -> str:
    scores = "no frame was scored" if state.validation is None else ", ".join(score_facts(state.validation))
    return f"step {state.validated_step:,}: validation {scores}"
