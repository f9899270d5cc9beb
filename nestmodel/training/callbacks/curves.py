"""Curves of the logged metrics, over all starts of a run.

Every start of a run has its own log directory. A start that resumes from a checkpoint copies the metrics logged before
that checkpoint to `earlier_metrics.csv`, so that it does not depend on earlier directories.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from numpy.typing import NDArray
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import rank_zero_warn

from nestdata.output import replace_file
from nestmodel.training.metrics_file import METRICS, csv_lines

BLUE = "#2f6f9f"
ORANGE = "#b5532a"
GREY = "#4b4b4b"
PALE_BLUE = "#9db8cc"
PALE_ORANGE = "#d9b8a6"


def new_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure whose layout fits its labels. matplotlib is imported here.

    The figure is created without pyplot, so that no display is needed and no global state changes.

    Args:
        width: Width in inches.
        height: Height in inches.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def finish_axes(axes: Any, title: str, *, has_legend: bool) -> None:
    """Adds a title, a grid and optionally a legend to axes that are already drawn."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    if has_legend:
        axes.legend(fontsize=8)


Series = dict[str, tuple[list[int], list[float]]]
EARLIER = "earlier_metrics.csv"


class Curves(pl.Callback):
    """Draws `curves.png` from the logged metrics at the end of a run, also when it ends with an error."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Copies the metrics that were logged before the checkpoint from which this run resumes."""
        if not trainer.ckpt_path:
            return
        earlier = Path(trainer.ckpt_path).resolve().parent.parent
        for directory in _log_directories(trainer):
            try:
                copy_earlier_metrics(earlier, directory, trainer.global_step)
            except OSError as error:
                rank_zero_warn(f"{earlier}: the metrics of the previous start are not copied: {error}.")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Draws the curves when the run ends normally."""
        self._draw(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Draws the curves up to the error."""
        self._draw(trainer)

    def _draw(self, trainer: pl.Trainer) -> None:
        for logger in trainer.loggers:
            with suppress(OSError):  # the run may be ending because of it
                logger.save()
        for directory in _log_directories(trainer):
            if (directory / METRICS).exists():
                try:
                    draw_curves(directory, directory / "curves.png")
                except (OSError, ValueError) as error:
                    rank_zero_warn(f"{directory}: the curves cannot be drawn: {error}.")


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
        columns = list(dict.fromkeys(name for row in rows for name in row))
        replace_file(directory / EARLIER, csv_lines(columns, rows, header=True))


def read_metrics(directory: Path) -> Series:
    """Returns the metrics of a run as (steps, values) by name, from its first start to the start of this directory."""
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
    figure = new_figure(6.5, 13.0)
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
    figure.savefig(picture, dpi=130)


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
