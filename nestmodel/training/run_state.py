"""Where a run stands: step, time left, the latest metrics, and what the run is doing.

`RunState` is read from the trainer once per interval, and renderers show it: see `callbacks.progress`. Reading it never
waits for a GPU, because all metrics of `NestModel` are on the CPU.
"""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Literal, cast

import pytorch_lightning as pl
import torch

from nestmodel.training.step_limits import num_steps_of_run

Activity = Literal["starting", "training", "validating", "writing a checkpoint", "finished"]

_FIRST_STEPS = 5
"""Steps of a start that do not count for its speed once there are more: they include compilation and empty caches."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Loss and accuracy over the scored tokens, in training or in a validation."""

    loss: float
    """In nats per token."""

    token_entropy: float
    """In nats per token: the loss of a model that knows only how frequent each token is."""

    accuracy: float
    """Share of tokens that the model predicts as the most likely class."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands."""

    step: int
    """Optimizer steps made, those of earlier starts included."""

    num_steps: int | None
    """Optimizer steps of the whole run; None if only time or a signal ends it."""

    activity: Activity
    seconds_left: float | None = None
    """Estimate for the rest of the run, validations and checkpoints included; None during the first steps."""

    training: Scores | None = None
    """Means of the scores since the state before; None before the first step."""

    validation: Scores | None = None
    """Scores of the last validation in this start."""

    validated_step: int | None = None
    """Optimizer steps made at that validation."""

    audio_s_per_s: float | None = None
    """Seconds of audio per second, over all ranks."""

    data_wait: float | None = None
    """Share of time spent waiting for data."""

    memory_gb: float | None = None
    """See `peak_memory_bytes`, in GB."""

    steps_skipped: int = 0
    """Number of non-finite steps."""

    microbatch: tuple[int, int] | None = None
    """Of a step that takes long: microbatches of this rank that are done, and their number."""


class RunClock:
    """Estimates the time that a run still takes, from the steps of this start.

    Args:
        first_step: Optimizer steps made before this start.
        now: Clock in seconds.
    """

    def __init__(self, first_step: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._first_step, self._began_s = first_step, now()
        self._counted_from = first_step + _FIRST_STEPS
        self._start_s: float | None = None

    def count(self, step: int) -> None:
        """Notes the end of an optimizer step."""
        if self._start_s is None and step >= self._counted_from:
            self._counted_from, self._start_s = step, self._now()

    def seconds_left(self, step: int, num_steps: int | None) -> float | None:
        """Returns the estimate at a step, or None if there is none yet or the run has no last step."""
        if num_steps is None or step <= self._first_step:
            return None
        is_early = self._start_s is None or step <= self._counted_from
        since_s, since_step = (self._began_s, self._first_step) if is_early else (self._start_s, self._counted_from)
        assert since_s is not None
        seconds_per_step = (self._now() - since_s) / (step - since_step)
        return max(0, num_steps - step) * seconds_per_step


class RecentSteps:
    """Sums over the steps since the last state that was shown: their scores, audio and time.

    Args:
        now: Clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._shown: Scores | None = None
        self._rate: float | None = None
        self._paused_s: float | None = None
        self.restart()

    def add_audio(self, seconds: float) -> None:
        """Adds the audio of a microbatch of all ranks."""
        self._audio_s += seconds

    def add_step(self, trainer: pl.Trainer) -> None:
        """Adds the scores of an optimizer step."""
        metrics = trainer.callback_metrics
        if "train_loss" in metrics:
            values = (float(metrics[f"train_{name}"]) for name in ("loss", "token_entropy", "accuracy"))
            self._scores.append(Scores(*values))

    @property
    def scores(self) -> Scores | None:
        """Means over the steps; those of the last step that was shown if there was none since."""
        if self._scores:
            means = [sum(values) / len(self._scores) for values in zip(*map(astuple, self._scores), strict=True)]
            self._shown = Scores(*means)
        return self._shown

    @property
    def audio_s_per_s(self) -> float | None:
        """Seconds of audio of all ranks in a second; None if no time has passed."""
        passed_s = self._now() - self._since_s
        if self._audio_s and passed_s > 0:
            self._rate = self._audio_s / passed_s
        return self._rate

    def pause(self) -> None:
        """Stops the clock, until `resume`: what comes now is not training."""
        self._paused_s = self._now()

    def resume(self) -> None:
        """Lets the clock go on."""
        if self._paused_s is not None:
            self._since_s += self._now() - self._paused_s
            self._paused_s = None

    def restart(self) -> None:
        """Begins anew, after a state with them was shown."""
        self._scores: list[Scores] = []
        self._audio_s, self._since_s = 0.0, self._now()


def read_state(
    trainer: pl.Trainer,
    clock: RunClock,
    activity: Activity,
    *,
    validated_step: int | None = None,
    recent: "RecentSteps | None" = None,
    microbatch: tuple[int, int] | None = None,
) -> RunState:
    """Returns where a run stands.

    Args:
        trainer: Of the run, in `fit`.
        clock: Of this start.
        activity: What the run is doing.
        validated_step: Optimizer steps made at the last validation of this start, if there was one.
        recent: What the steps since the state before have given.
        microbatch: Where within a long step the run is.
    """
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    step, num_steps = trainer.global_step, num_steps_of_run(trainer)
    requests = cast(Any, trainer).lightning_module.stop_requests
    left = [clock.seconds_left(step, num_steps), requests.seconds_left]
    return RunState(
        step=step,
        num_steps=num_steps,
        activity=activity,
        # The step that passes `max_time` ends after it.
        seconds_left=min((seconds for seconds in left if seconds is not None), default=None),
        training=None if recent is None else recent.scores,
        validation=None if validated_step is None else _scores(metrics, "val"),
        validated_step=validated_step,
        audio_s_per_s=None if recent is None else recent.audio_s_per_s,
        data_wait=metrics.get("data_wait"),
        memory_gb=metrics.get("memory_gb"),
        steps_skipped=int(metrics.get("steps_skipped", 0)),
        microbatch=microbatch,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process: what torch has reserved on its GPU, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return max_rss_bytes()


def max_rss_bytes() -> int:
    """Returns the peak resident memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def format_duration(seconds: float) -> str:
    """Returns a duration as hours, minutes and seconds, or as days and hours from two days on."""
    hours, rest = divmod(round(seconds), 3600)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _scores(metrics: dict[str, float], stage: str) -> Scores | None:
    names = [f"{stage}_{name}" for name in ("loss", "token_entropy", "accuracy")]
    return Scores(*(metrics[name] for name in names)) if all(name in metrics for name in names) else None
