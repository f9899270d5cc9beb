"""The metrics of a run as a picture, over all its starts.

Every start of a run has a directory of its own. One that goes on from a checkpoint takes over what was logged up to
there, as `earlier_metrics.csv`, so that nothing hangs on the directories before.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from numpy.typing import NDArray
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import rank_zero_warn

Series = dict[str, tuple[list[int], list[float]]]
METRICS = "metrics.csv"
_KEY = "nest_metrics"
EARLIER = "earlier_metrics.csv"


class Curves(pl.Callback):
    """Draws `curves.png` from the metrics when the run ends, however it ends."""

    def __init__(self) -> None:
        self._before: list[Path] = []

    def on_save_checkpoint(self, trainer: pl.Trainer, _module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Notes where the metrics of this start lie."""
        checkpoint[_KEY] = [str(directory) for directory in _directories(trainer)]

    def on_load_checkpoint(self, trainer: pl.Trainer, _module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Looks for the metrics of the start before: beside the checkpoint, or where they were written."""
        beside = [Path(trainer.ckpt_path).resolve().parent.parent] if trainer.ckpt_path else []
        self._before = beside + [Path(directory) for directory in checkpoint.get(_KEY, [])]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Takes over what was logged before the checkpoint that training goes on from."""
        before = next((directory for directory in self._before if (directory / METRICS).exists()), None)
        if before is None:
            return
        for directory in _directories(trainer):
            try:
                take_over(before, directory, trainer.global_step)
            except OSError as error:
                rank_zero_warn(f"{before}: what was logged there is not taken over: {error}.")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Draws at the regular end."""
        self._draw(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Draws what there is when the run is broken off."""
        self._draw(trainer)

    def _draw(self, trainer: pl.Trainer) -> None:
        for logger in trainer.loggers:
            logger.save()
        for directory in _directories(trainer):
            if (directory / METRICS).exists():
                try:
                    draw_curves(directory, directory / "curves.png")
                except (OSError, ValueError) as error:
                    rank_zero_warn(f"{directory}: no curves can be drawn: {error}.")


def take_over(before: Path, directory: Path, step: int) -> None:
    """Copies what the start before logged of the steps before `step`, and what that one had taken over itself.

    Args:
        before: Its directory; where it has no metrics, nothing is done.
        directory: Of this start.
        step: The one that training goes on with.
    """
    rows = [row for row in _rows(before) if int(row["step"]) < step]
    if rows:
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / (EARLIER + ".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(directory / EARLIER)


def read_metrics(directory: Path) -> Series:
    """Reads what a run has logged, in all its starts up to the one of a directory: (steps, values) by metric."""
    series: Series = defaultdict(lambda: ([], []))
    for row in _rows(directory):
        for name, value in row.items():
            if value and name not in ("step", "epoch"):
                series[name][0].append(int(row["step"]))
                series[name][1].append(float(value))
    return dict(series)


def draw_curves(directory: Path, picture: Path) -> None:
    """Draws loss against the entropy of the tokens, masked accuracy, learning rate, speed and waiting."""
    from matplotlib.figure import Figure

    series = read_metrics(directory)
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


def _directories(trainer: pl.Trainer) -> list[Path]:
    """Where metrics are written, if by this rank."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    return [Path(logger.log_dir) for logger in loggers] if trainer.is_global_zero else []


def _rows(directory: Path) -> Iterator[dict[str, str]]:
    """Whole rows: the last one may have been cut off by a full disk or a kill, and another file may have the name."""
    for path in (directory / EARLIER, directory / METRICS):
        if path.exists():
            with path.open(newline="", errors="replace") as file:
                for row in csv.DictReader(line.replace("\0", "") for line in file if line.endswith("\n")):
                    is_whole = None not in row and None not in row.values()
                    if is_whole and row.get("step", "").isdecimal():
                        yield row
