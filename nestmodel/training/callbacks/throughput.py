"""What a run tells while it runs: throughput, and plain progress lines."""

import sys
import time
from collections.abc import Mapping
from typing import Any, cast

import pytorch_lightning as pl

from nestdata import AudioNoiseBatch
from nestmodel.training.module import NestModel
from nestmodel.training.step_limits import ends_step


class Throughput(pl.Callback):
    """Logs how much audio a second is learned from, and which share of the time goes into waiting for it.

    Counts what this rank does, times the number of ranks. Validation and checkpoints are left out of the time.
    """

    def __init__(self) -> None:
        self._reset()
        self._batch_ended: float | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        """Takes the time since the last batch as waiting."""
        self._batch_started = time.perf_counter()
        if self._batch_ended is not None:
            self._waiting_s += self._batch_started - self._batch_ended

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _outputs: Any, batch: AudioNoiseBatch, batch_idx: int
    ) -> None:
        """Adds up a batch, and logs every `log_every_n_steps` steps."""
        self._batch_ended = time.perf_counter()
        self._working_s += self._batch_ended - self._batch_started
        self._samples += int(batch.audio_len.sum())
        self._slots += batch.audio.numel()
        self._replaced += len(batch.bad_cuts)
        self._failed_reads += sum(len(mix.bad_noise) for mix in batch.mixes)
        self._white += sum("white noise" in mix.sources for mix in batch.mixes)
        is_step = ends_step(trainer, batch_idx)
        every: int = cast(Any, trainer).log_every_n_steps  # set by Lightning, and missing in its annotations
        if is_step and trainer.global_step % max(1, every) == 0:
            total_s = self._working_s + self._waiting_s
            rate = cast(NestModel, pl_module).config.features.sampling_rate
            pl_module.log_dict(
                {
                    "audio_s_per_s": self._samples / rate / total_s * trainer.world_size,
                    "data_wait": self._waiting_s / total_s,
                    "padding": 1 - self._samples / self._slots,
                    "cuts_replaced": float(self._replaced),
                    "noise_failed_reads": float(self._failed_reads),
                    "noise_white": float(self._white),
                },
                batch_size=1,
            )
            self._reset()

    def on_validation_start(self, *_: Any) -> None:
        """Stops the clock."""
        self._batch_ended = None

    def on_save_checkpoint(self, *_: Any) -> None:
        """Stops the clock."""
        self._batch_ended = None

    def _reset(self) -> None:
        self._working_s = self._waiting_s = 0.0
        self._samples = self._slots = self._replaced = self._failed_reads = self._white = 0


class PlainProgress(pl.Callback):
    """Prints a line now and then, for logs where a progress bar would be noise."""

    def __init__(self, seconds_between: float = 10.0) -> None:
        self.seconds_between = seconds_between
        self._last = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Prints where the training stands."""
        if trainer.is_global_zero and time.monotonic() - self._last > self.seconds_between:
            self._last = time.monotonic()
            print(_progress_line(trainer.global_step, trainer.callback_metrics), file=sys.stderr, flush=True)  # noqa: T201

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Prints what validation gave."""
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
        f"step {step}: validation loss {loss:.3f}, entropy of its tokens {entropy:.3f}, "
        f"masked accuracy {100 * accuracy:.1f} %"
    )
