"""What a run tells while it runs and when it ends: throughput, plain progress lines, and a picture of its curves."""

import csv
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytorch_lightning as pl
from numpy.typing import NDArray
from pytorch_lightning.loggers import CSVLogger

from nestdata import AudioNoiseBatch
from nestmodel.model import NestModel

Series = dict[str, tuple[list[int], list[float]]]


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
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _outputs: Any, batch: AudioNoiseBatch, _idx: int
    ) -> None:
        """Adds up a batch, and logs every `log_every_n_steps` steps."""
        self._batch_ended = time.perf_counter()
        self._working_s += self._batch_ended - self._batch_started
        self._samples += int(batch.audio_len.sum())
        self._slots += batch.audio.numel()
        self._replaced += len(batch.bad_cuts)
        self._failed_reads += sum(len(mix.bad_noise) for mix in batch.mixes)
        self._white += sum("white noise" in mix.sources for mix in batch.mixes)
        is_step = not trainer.fit_loop._should_accumulate()
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


class Curves(pl.Callback):
    """Draws `curves.png` from the metrics when the run ends, however it ends."""

    def on_fit_end(self, trainer: pl.Trainer, _module: pl.LightningModule) -> None:
        """Draws at the regular end."""
        self._draw(trainer)

    def on_exception(self, trainer: pl.Trainer, _module: pl.LightningModule, _error: BaseException) -> None:
        """Draws what there is when the run is broken off."""
        self._draw(trainer)

    def _draw(self, trainer: pl.Trainer) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger) and trainer.is_global_zero:
                logger.save()
                metrics = Path(logger.log_dir) / "metrics.csv"
                if metrics.exists():
                    draw_curves(metrics, Path(logger.log_dir) / "curves.png")


def read_metrics(path: Path) -> Series:
    """Reads a `metrics.csv` of Lightning into (steps, values) by name of the metric."""
    series: Series = defaultdict(lambda: ([], []))
    with path.open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    series[name][0].append(int(row["step"]))
                    series[name][1].append(float(value))
    return dict(series)


def draw_curves(metrics: Path, picture: Path) -> None:
    """Draws loss against the entropy of the tokens, masked accuracy, learning rate, speed and waiting."""
    from matplotlib.figure import Figure

    series = read_metrics(metrics)
    panels: list[tuple[str, dict[str, str], float]] = [
        (
            "loss and entropy of the tokens, nats",
            {
                "train_loss": "#9db8cc",
                "train_token_entropy": "#d9b8a6",
                "val_loss": "#2f6f9f",
                "val_token_entropy": "#b5532a",
            },
            1.0,
        ),
        ("masked accuracy, %", {"train_accuracy": "#9db8cc", "val_accuracy": "#2f6f9f"}, 100.0),
        ("learning rate", {"lr": "#4b4b4b"}, 1.0),
        ("seconds of audio per second", {"audio_s_per_s": "#4b4b4b"}, 1.0),
        ("share of time waiting for data, %", {"data_wait": "#4b4b4b"}, 100.0),
    ]
    figure = Figure(figsize=(9, 13), layout="constrained")
    for axis, (title, lines, factor) in zip(
        figure.subplots(len(panels), 1, sharex=True, height_ratios=[2.2, 1.2, 1, 1, 1]), panels, strict=True
    ):
        for name, colour in lines.items():
            if name in series:
                steps, values = series[name][0], factor * np.array(series[name][1])
                if name.startswith("val"):
                    axis.plot(steps, values, color=colour, label=name, marker="o", markersize=3)
                else:
                    # Steps differ much, since each holds cuts of one length: the line is a mean over neighbours.
                    axis.plot(steps, values, color=colour, linewidth=0.5, alpha=0.4)
                    axis.plot(steps, smooth(values), color=colour, label=name)
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.25)
        if len(lines) > 1 and axis.has_data():
            axis.legend(fontsize=8)
    axis.set_xlabel("optimizer step")
    figure.savefig(picture, dpi=90)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Averages each value with its neighbours, a twentieth of the series wide; fewer of them at the ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.maximum(np.arange(len(values)) - half, 0)
    last = np.minimum(np.arange(len(values)) + half + 1, len(values))
    means: NDArray[np.float64] = (sums[last] - sums[first]) / (last - first)
    return means


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
