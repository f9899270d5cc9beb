"""Whether training is well: a warning in plain words where it is not, once for each illness until it is over.

Owns the rules and their limits. Looks at what is logged anyway, every `log_every_n_steps` steps, so that it costs
nothing in between.
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

_CHECKS = 20
"""Checks that a mean is taken over, and that have to pass before anything but an explosion is judged."""

_STUCK_BELOW = 0.02
"""A loss that is not below the entropy of the tokens by this share of it has learned their frequency alone."""

_STUCK_AFTER = 2000
"""Optimizer steps before which a loss may still be there, however short the warm-up is."""

_COLLAPSED_SHARE = 0.01
"""Tokens whose perplexity is less than this share of the classes say almost nothing."""

_EXPLODED = 20.0
"""A gradient norm is exploding where it is so many times its median over the last checks, three times in a row."""


class UnhealthyTrainingWarning(UserWarning):
    """Training goes on, but will probably not lead anywhere."""


class HealthMetrics(NamedTuple):
    """What is looked at."""

    step: int
    loss: float
    token_entropy: float
    """In nats, as the loss."""

    token_perplexity: float
    prediction_perplexity: float
    grad_norm: float


class HealthChecker:
    """Judges a run by its vitals, one check after the other.

    Args:
        num_classes: Classes of a codebook.
        warmup_steps: Optimizer steps before which a loss may still be at the entropy.
    """

    def __init__(self, num_classes: int, warmup_steps: int) -> None:
        self._num_classes = num_classes
        self._patient_until = max(2 * warmup_steps, _STUCK_AFTER)
        self._recent: deque[HealthMetrics] = deque(maxlen=_CHECKS)
        self._norms: deque[float] = deque(maxlen=5 * _CHECKS)
        self._num_large = 0
        self._ill: set[str] = set()

    def check(self, vitals: HealthMetrics) -> list[str]:
        """Returns what is newly wrong, a sentence or two each."""
        found = {}
        if message := self._explosion(vitals):
            found["explosion"] = message
        if math.isfinite(vitals.loss):
            self._recent.append(vitals)
        if len(self._recent) == _CHECKS:
            if message := self._collapse(vitals):
                found["collapse"] = message
            if message := self._stuck(vitals):
                found["stuck"] = message
        news = [message for name, message in found.items() if name not in self._ill]
        self._ill = set(found)
        return news

    def _explosion(self, vitals: HealthMetrics) -> str | None:
        if not math.isfinite(vitals.grad_norm):
            return (
                f"step {vitals.step}: the gradient norm is {vitals.grad_norm}. Lower optimizer.lr, set "
                "trainer.gradient_clip_val, or look for audio that is no audio."
            )
        usual = statistics.median(self._norms) if len(self._norms) >= _CHECKS else math.inf
        self._num_large = self._num_large + 1 if vitals.grad_norm > _EXPLODED * usual else 0
        if self._num_large < 3:
            self._norms.append(vitals.grad_norm)
            return None
        return (
            f"step {vitals.step}: the gradient norm is {vitals.grad_norm:.3g}, {vitals.grad_norm / usual:.0f} times "
            "what it was: training is exploding. Lower optimizer.lr, lengthen the warm-up, or set "
            "trainer.gradient_clip_val."
        )

    def _collapse(self, vitals: HealthMetrics) -> str | None:
        perplexity = statistics.fmean(check.token_perplexity for check in self._recent)
        if perplexity >= max(2.0, _COLLAPSED_SHARE * self._num_classes):
            return None
        return (
            f"step {vitals.step}: the tokens are about as varied as {perplexity:.1f} classes of {self._num_classes} "
            "would be: the codebook has collapsed, and there is hardly anything to predict. Listen to the audio "
            "(`nestdata sample-batch preview`): silence and constant noise give one token."
        )

    def _stuck(self, vitals: HealthMetrics) -> str | None:
        loss = statistics.fmean(check.loss for check in self._recent)
        entropy = statistics.fmean(check.token_entropy for check in self._recent)
        if vitals.step < self._patient_until or loss < (1 - _STUCK_BELOW) * entropy:
            return None
        predicted = statistics.fmean(check.prediction_perplexity for check in self._recent)
        return (
            f"step {vitals.step}: the loss ({loss:.3f}) is where the entropy of the tokens ({entropy:.3f}) is: the "
            "model knows how frequent each token is and nothing else (its predictions are as varied as "
            f"{predicted:.1f} classes). Try another optimizer.lr, shorter masked blocks, or more data."
        )


class Health(pl.Callback):
    """Warns where the loss is stuck, the codebook has collapsed, or gradients explode."""

    def __init__(self) -> None:
        self._diagnosis: HealthChecker | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Checks what was logged, every `log_every_n_steps` steps; the same on every rank, said by the first."""
        every: int = cast(Any, trainer).log_every_n_steps  # set by Lightning, and missing in its annotations
        if not ends_step(trainer, batch_idx) or trainer.global_step % max(1, every):
            return
        if "train_loss" not in trainer.callback_metrics:
            return  # every step so far was skipped
        if self._diagnosis is None:
            config = cast(NestModel, pl_module).config
            self._diagnosis = HealthChecker(config.quantizer.num_classes, config.optimizer.warmup_steps)
        for message in self._diagnosis.check(_vitals(trainer.global_step, trainer.callback_metrics)):
            rank_zero_warn(message, category=UnhealthyTrainingWarning)


def _vitals(step: int, metrics: Mapping[str, Any]) -> HealthMetrics:
    names = ("train_loss", "train_token_entropy", "train_token_perplexity", "train_prediction_perplexity", "grad_norm")
    return HealthMetrics(step, *(float(metrics[name]) for name in names))
