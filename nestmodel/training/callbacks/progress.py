"""Progress of training as plain lines on stderr."""

import sys
import time
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl


class PlainProgress(pl.Callback):
    """Prints a line at intervals, for output that is not a terminal and where a progress bar is unreadable.

    Args:
        seconds_between: Minimum number of seconds between two lines.
    """

    def __init__(self, seconds_between: float = 10.0) -> None:
        self.seconds_between = seconds_between
        self._last_s = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Prints the current step and the latest metrics if the interval has passed."""
        if trainer.is_global_zero and time.monotonic() - self._last_s > self.seconds_between:
            self._last_s = time.monotonic()
            print(_progress_line(trainer.global_step, trainer.callback_metrics), file=sys.stderr, flush=True)  # noqa: T201

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Prints the metrics of the validation."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            print(_validation_line(trainer.global_step, trainer.callback_metrics), file=sys.stderr, flush=True)  # noqa: T201


def _progress_line(step: int, metrics: Mapping[str, Any]) -> str:
    parts = [f"step {step}"]
    if metrics.get("steps_skipped"):
        parts.append(f"{int(metrics['steps_skipped'])} steps skipped")
    if "train_loss" in metrics:
        parts.append(f"loss {float(metrics['train_loss']):.3f}, entropy {float(metrics['train_token_entropy']):.3f}")
        parts.append(f"masked accuracy {100 * float(metrics['train_accuracy']):.1f} %")
    if "audio_s_per_s" in metrics:
        parts.append(f"{float(metrics['audio_s_per_s']):.0f} s of audio/s")
        parts.append(f"{100 * float(metrics['data_wait']):.0f} % waiting")
    return ", ".join(parts)


def _validation_line(step: int, metrics: Mapping[str, Any]) -> str:
    loss, entropy, accuracy = (float(metrics[f"val_{name}"]) for name in ("loss", "token_entropy", "accuracy"))
    return (
        f"step {step}: validation loss {loss:.3f}, token entropy {entropy:.3f}, masked accuracy {100 * accuracy:.1f} %"
    )
