"""Training health checks, which warn once per incident: stuck loss, collapsed codebook, exploding gradients.

The checks run every `log_every_n_steps` steps, on metrics that are logged anyway.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn

from nestmodel.training.module import NestModel
from nestmodel.training.step_limits import ends_step

_WINDOW = 20
"""Number of checks over which means are taken. Until then, only exploding gradients are reported."""

_STUCK_MARGIN = 0.02
"""A loss is stuck if it is less than this share below the token entropy, the loss of a model that knows only the
frequency of each token."""

_STUCK_AFTER = 2000
"""Minimum number of optimizer steps before a loss is reported as stuck, however short the warm-up is."""

_COLLAPSED_SHARE = 0.01
"""The codebook has collapsed if the perplexity of the tokens is below this share of the number of classes."""

_EXPLODING_FACTOR = 20.0
"""Gradients explode if their norm exceeds its recent median by this factor in three consecutive checks."""


class UnhealthyTrainingWarning(UserWarning):
    """Training continues, but the model will probably not learn anything useful."""


class HealthMetrics(NamedTuple):
    """The metrics of one check."""

    step: int
    loss: float
    """In nats per scored token."""

    token_entropy: float
    """In nats."""

    token_perplexity: float
    prediction_perplexity: float
    grad_norm: float


class HealthChecker:
    """Finds problems of a run in its metrics, from one check to the next.

    Args:
        num_classes: Classes of a codebook.
        warmup_steps: Steps of the learning-rate warm-up. A loss is reported as stuck only after twice as many steps.
    """

    def __init__(self, num_classes: int, warmup_steps: int) -> None:
        self._num_classes = num_classes
        self._stuck_after = max(2 * warmup_steps, _STUCK_AFTER)
        self._recent: deque[HealthMetrics] = deque(maxlen=_WINDOW)
        self._norms: deque[float] = deque(maxlen=5 * _WINDOW)
        self._num_large = 0
        self._ongoing: set[str] = set()

    def check(self, metrics: HealthMetrics) -> list[str]:
        """Returns a message for every problem that was not present at the previous check."""
        found = {}
        if message := self._explosion(metrics):
            found["explosion"] = message
        if math.isfinite(metrics.loss):
            self._recent.append(metrics)
        if len(self._recent) == _WINDOW:
            if message := self._collapse(metrics):
                found["collapse"] = message
            if message := self._stuck(metrics):
                found["stuck"] = message
        new = [message for name, message in found.items() if name not in self._ongoing]
        self._ongoing = set(found)
        return new

    def _explosion(self, metrics: HealthMetrics) -> str | None:
        if not math.isfinite(metrics.grad_norm):
            return (
                f"step {metrics.step}: the gradient norm is {metrics.grad_norm}. Lower optimizer.lr, set "
                "trainer.gradient_clip_val, or check the audio for corrupt files."
            )
        usual = statistics.median(self._norms) if len(self._norms) >= _WINDOW else math.inf
        self._num_large = self._num_large + 1 if metrics.grad_norm > _EXPLODING_FACTOR * usual else 0
        if self._num_large < 3:
            self._norms.append(metrics.grad_norm)
            return None
        return (
            f"step {metrics.step}: the gradient norm is {metrics.grad_norm:.3g}, {metrics.grad_norm / usual:.0f} times "
            "its recent median: training is exploding. Lower optimizer.lr, lengthen the warm-up, or set "
            "trainer.gradient_clip_val."
        )

    def _collapse(self, metrics: HealthMetrics) -> str | None:
        perplexity = statistics.fmean(check.token_perplexity for check in self._recent)
        if perplexity >= max(2.0, _COLLAPSED_SHARE * self._num_classes):
            return None
        return (
            f"step {metrics.step}: the perplexity of the tokens is {perplexity:.1f} classes of {self._num_classes}: "
            "the codebook has collapsed, so there is hardly anything to predict. Listen to the audio "
            "(`nestdata sample-batch preview`): silence and constant noise give a single token."
        )

    def _stuck(self, metrics: HealthMetrics) -> str | None:
        loss = statistics.fmean(check.loss for check in self._recent)
        entropy = statistics.fmean(check.token_entropy for check in self._recent)
        if metrics.step < self._stuck_after or loss < (1 - _STUCK_MARGIN) * entropy:
            return None
        predicted = statistics.fmean(check.prediction_perplexity for check in self._recent)
        return (
            f"step {metrics.step}: the loss ({loss:.3f}) is stuck at the entropy of the tokens ({entropy:.3f}): the "
            "model has learned only how frequent each token is (the perplexity of its predictions is "
            f"{predicted:.1f} classes). Try another optimizer.lr, shorter masked blocks, or more data."
        )


class Health(pl.Callback):
    """Warns if the loss is stuck, the codebook has collapsed, or gradients explode."""

    def __init__(self) -> None:
        self._checker: HealthChecker | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Checks the logged metrics every `log_every_n_steps` steps. All ranks check, and rank 0 warns."""
        every: int = cast(Any, trainer).log_every_n_steps  # exists, but is missing in Lightning's annotations
        if not ends_step(trainer, batch_idx) or trainer.global_step % max(1, every):
            return
        if "train_loss" not in trainer.callback_metrics:
            return  # all steps so far were skipped
        if self._checker is None:
            config = cast(NestModel, pl_module).config
            self._checker = HealthChecker(config.quantizer.num_classes, config.optimizer.warmup_steps)
        for message in self._checker.check(_health_metrics(trainer.global_step, trainer.callback_metrics)):
            rank_zero_warn(message, category=UnhealthyTrainingWarning)


def _health_metrics(step: int, metrics: Mapping[str, Any]) -> HealthMetrics:
    names = ("train_loss", "train_token_entropy", "train_token_perplexity", "train_prediction_perplexity", "grad_norm")
    return HealthMetrics(step, *(float(metrics[name]) for name in names))
