"""Where a run stands: step, time left, the latest metrics, and what the run is doing.

`RunState` is read from the trainer once per interval, and renderers show it: see `callbacks.progress`. Reading it never
waits for a GPU, because all metrics of `NestModel` are on the CPU.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import fmean
from typing import Any, Literal, cast

import pytorch_lightning as pl
import torch

from nestmodel.training.step_limits import num_steps_of_run

Activity = Literal["starting", "training", "validating", "writing a checkpoint", "finished"]

_FIRST_STEPS = 5
"""Steps of a start that do not count for its speed: they include compilation and empty caches."""


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
    """Optimizer steps made, including earlier starts."""

    num_steps: int | None
    """Optimizer steps of the whole run; None if only time or a signal ends it."""

    activity: Activity
    seconds_left: float | None = None
    """Estimate for the rest of the run, validations and checkpoints included; None during the first steps."""

    training: Scores | None = None
    """Means of the scores since the previous state; None before the first step."""

    validation: Scores | None = None
    """Scores of the last validation in this start."""

    validated_step: int | None = None
    """Optimizer steps made at that validation."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The latest metrics by name, such as `audio_s_per_s` and `steps_skipped`."""

    microbatch: tuple[int, int] | None = None
    """Within a long step: number of microbatches of this rank that are done, and of all."""


class RunClock:
    """Estimates the time that a run still takes, from the steps of this start.

    Args:
        first_step: Optimizer steps made before this start.
        now: Clock in seconds.
    """

    def __init__(self, first_step: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._start = self._warm = first_step, now()

    def count(self, step: int) -> None:
        """Notes the end of an optimizer step."""
        if self._warm == self._start and step >= self._start[0] + _FIRST_STEPS:
            self._warm = step, self._now()

    def seconds_left(self, step: int, num_steps: int | None) -> float | None:
        """Returns the estimate at a step, or None if there is none yet or the run has no last step."""
        since_step, since_s = self._warm
        if num_steps is None or step <= since_step or self._warm == self._start:
            return None
        return max(0, num_steps - step) * (self._now() - since_s) / (step - since_step)


def read_state(
    trainer: pl.Trainer,
    clock: RunClock,
    activity: Activity,
    *,
    validated_step: int | None = None,
    training: Scores | None = None,
    microbatch: tuple[int, int] | None = None,
) -> RunState:
    """Returns where a run stands.

    Args:
        trainer: The trainer of the run, in `fit`.
        clock: The clock of this start.
        activity: What the run is doing.
        validated_step: Optimizer steps made at the last validation of this start, if there was one.
        training: Scores of the latest steps.
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
        training=training,
        validation=None if validated_step is None else scores_of(metrics, "val"),
        validated_step=validated_step,
        metrics=metrics,
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


def scores_of(metrics: Mapping[str, Any], stage: str) -> Scores | None:
    """Returns the scores of `train` or `val` among logged metrics; None without them, or if nothing was scored."""
    names = [f"{stage}_{name}" for name in ("loss", "token_entropy", "accuracy")]
    values = [float(metrics.get(name, math.nan)) for name in names]
    return None if any(map(math.isnan, values)) else Scores(*values)


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Returns the means over several steps, at least one."""
    return Scores(*map(fmean, zip(*map(astuple, scores), strict=True)))
