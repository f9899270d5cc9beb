"""Curves of the logged metrics, over all starts of a run.

Every start of a run has its own log directory. A start that resumes from a checkpoint copies the metrics logged before
that checkpoint to `earlier_metrics.csv`, so that it does not depend on earlier directories.
"""

import csv
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytorch_lightning as pl
from numpy.typing import NDArray
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import rank_zero_warn

from nestmodel.figures import BLUE, GREY, ORANGE, PALE_BLUE, PALE_ORANGE, finish_axes, new_figure

Series = dict[str, tuple[list[int], list[float]]]
METRICS = "metrics.csv"
EARLIER = "earlier_metrics.csv"
_KEY = "nest_metrics"
_SECONDS_BETWEEN = 60.0
"""Minimum number of seconds between two drawings during a run."""


@runtime_checkable
class TakesPictures(Protocol):
    """A logger that shows pictures."""

    def log_picture(self, name: str, path: Path, step: int) -> None:
        """Logs a PNG file under a name."""


class Curves(pl.Callback):
    """Draws `curves.png` from the logged metrics at the end of a run, also when it ends with an error.

    Loggers that take pictures get it then, and after validations, at most once a minute.
    """

    def __init__(self) -> None:
        self._earlier: list[Path] = []
        self._drawn_s = -math.inf

    def on_save_checkpoint(self, trainer: pl.Trainer, _module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stores the log directories of this start."""
        checkpoint[_KEY] = [str(directory) for directory in _log_directories(trainer)]

    def on_load_checkpoint(self, trainer: pl.Trainer, _module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stores where the metrics of the previous start may be: beside the checkpoint, or where they were written."""
        beside = [Path(trainer.ckpt_path).resolve().parent.parent] if trainer.ckpt_path else []
        self._earlier = beside + [Path(directory) for directory in checkpoint.get(_KEY, [])]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Copies the metrics that were logged before the checkpoint from which this run resumes."""
        earlier = next((directory for directory in self._earlier if (directory / METRICS).exists()), None)
        if earlier is None:
            return
        for directory in _log_directories(trainer):
            try:
                copy_earlier_metrics(earlier, directory, trainer.global_step)
            except OSError as error:
                rank_zero_warn(f"{earlier}: the metrics of the previous start are not copied: {error}.")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Draws the curves if a logger takes pictures."""
        is_due = time.monotonic() - self._drawn_s > _SECONDS_BETWEEN
        if trainer.training and is_due and any(isinstance(logger, TakesPictures) for logger in trainer.loggers):
            self._draw(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Draws the curves when the run ends normally."""
        self._draw(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Draws the curves up to the error."""
        self._draw(trainer)

    def _draw(self, trainer: pl.Trainer) -> None:
        for logger in trainer.loggers:
            logger.save()
        for directory in _log_directories(trainer):
            if (directory / METRICS).exists():
                try:
                    draw_curves(directory, directory / "curves.png")
                except (OSError, ValueError) as error:
                    rank_zero_warn(f"{directory}: the curves cannot be drawn: {error}.")
                    continue
                for logger in trainer.loggers:
                    if isinstance(logger, TakesPictures):
                        logger.log_picture("curves", directory / "curves.png", trainer.global_step)
        self._drawn_s = time.monotonic()


def copy_earlier_metrics(earlier: Path, directory: Path, step: int) -> None:
    """Copies the metrics of a previous start for steps before `step`, including those it had copied itself.

    Args:
        earlier: Log directory of the previous start. If it holds no metrics, nothing is written.
        directory: Log directory of this start; created if it is missing.
        step: First optimizer step of this start.
    """
    rows = [row for row in _complete_rows(earlier) if int(row["step"]) < step]
    if rows:
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / (EARLIER + ".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(directory / EARLIER)


def read_metrics(directory: Path) -> Series:
    """Returns the logged metrics of a run as (steps, values) by name, from all starts up to that of the directory."""
    series: Series = defaultdict(lambda: ([], []))
    for row in _complete_rows(directory):
        for name, value in row.items():
            if value and name not in ("step", "epoch"):
                series[name][0].append(int(row["step"]))
                series[name][1].append(float(value))
    return dict(series)


def draw_curves(directory: Path, picture: Path) -> None:
    """Draws loss and token entropy, masked accuracy, learning rate, throughput and share of time waiting for data.

    Args:
        directory: Log directory with the metrics.
        picture: PNG file to write.
    """
    series = read_metrics(directory)
    panels: list[tuple[str, dict[str, str], float]] = [
        (
            "loss and entropy of the tokens, nats",
            {
                "train_loss": PALE_BLUE,
                "train_token_entropy": PALE_ORANGE,
                "val_loss": BLUE,
                "val_token_entropy": ORANGE,
            },
            1.0,
        ),
        ("masked accuracy, %", {"train_accuracy": PALE_BLUE, "val_accuracy": BLUE}, 100.0),
        ("learning rate", {"lr": GREY}, 1.0),
        ("seconds of audio per second", {"audio_s_per_s": GREY}, 1.0),
        ("share of time waiting for data, %", {"data_wait": GREY}, 100.0),
    ]
    figure = new_figure(9.0, 13.0)
    all_axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=[2.2, 1.2, 1, 1, 1])
    for axes, (title, lines, factor) in zip(all_axes, panels, strict=True):
        for name, colour in lines.items():
            if name in series:
                steps, values = series[name][0], factor * np.array(series[name][1])
                if name.startswith("val"):
                    axes.plot(steps, values, color=colour, label=name, marker="o", markersize=3)
                else:
                    # The cuts of a step are of similar length, so values vary between steps: the line is smoothed.
                    axes.plot(steps, values, color=colour, linewidth=0.5, alpha=0.4)
                    axes.plot(steps, smooth(values), color=colour, label=name)
        finish_axes(axes, title, has_legend=len(lines) > 1 and axes.has_data())
    all_axes[-1].set_xlabel("optimizer step")
    figure.savefig(picture, dpi=90)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the moving average over a twentieth of the series; the window is shorter at both ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.maximum(np.arange(len(values)) - half, 0)
    last = np.minimum(np.arange(len(values)) + half + 1, len(values))
    means: NDArray[np.float64] = (sums[last] - sums[first]) / (last - first)
    return means


def _log_directories(trainer: pl.Trainer) -> list[Path]:
    """Returns the directories to which this rank writes metrics: none except on rank 0."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    return [Path(logger.log_dir) for logger in loggers] if trainer.is_global_zero else []


def _complete_rows(directory: Path) -> Iterator[dict[str, str]]:
    """Yields the complete rows of the metrics.

    The last row may be truncated by a full disk or a kill, and a file of that name may belong to another program.
    """
    for path in (directory / EARLIER, directory / METRICS):
        if path.exists():
            with path.open(newline="", errors="replace") as file:
                for row in csv.DictReader(line.replace("\0", "") for line in file if line.endswith("\n")):
                    is_complete = None not in row and None not in row.values()
                    if is_complete and row.get("step", "").isdecimal():
                        yield row
