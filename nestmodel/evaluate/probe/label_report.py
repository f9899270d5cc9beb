"""Settings and result of a probe: the configuration, the report, and its plot. matplotlib is imported for the plot."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nestdata.field_docs import with_field_docs
from nestmodel.errors import ConfigError
from nestmodel.evaluate.features.batch import check_batch_seconds
from nestmodel.evaluate.probe.contestants import Contestant
from nestmodel.evaluate.probe.report import COLOURS, draw_layers, plain
from nestmodel.figures import GREY, finish_axes, new_figure

MIN_TRAIN_PER_CLASS = 2
"""Minimum number of training utterances of a class; smaller classes are excluded."""

_NORMAL_QUANTILE = 1.959964  # for an interval of 95 %


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """The label that is predicted, and the split into training and held-out utterances."""

    label: str
    """Name of the label: `language`, `speaker`, `text`, or any other field of the manifest."""

    held_out: float = 0.25
    """Share of the utterances of each class that is held out and scored, in (0, 1); the others are for training."""

    held_out_where: str | None = None
    """A field and its value, such as `split=test`: the utterances with it are held out, instead of a share."""

    group_by: str | None = None
    """A field, such as `speaker`: utterances with the same value are on the same side of the split. None splits
    single utterances."""

    train_per_class: int | None = None
    """Maximum number of training utterances per class; None uses all. With many utterances, an easy label can be
    predicted from any features, so that all encoders have the same score."""

    seed: int = 0
    """Determines the split and the weights of the untrained encoder."""

    max_batch_seconds: float = 120.0
    """Seconds of audio in a batch, padding included."""

    device: str = "auto"
    """Device of the encoder, such as `cpu`; `auto` is a GPU if there is one, the CPU otherwise."""

    allow_commands: bool = False
    """Whether to run the shell commands that manifests and corpora give instead of files. A `Corpus` that is given as
    an input was opened with a choice of its own."""

    def __post_init__(self) -> None:
        if not 0.0 < self.held_out < 1.0:
            raise ConfigError(f"held_out is {self.held_out:g}: expected a share between 0 and 1.")
        if self.train_per_class is not None and self.train_per_class < MIN_TRAIN_PER_CLASS:
            raise ConfigError(f"train_per_class is {self.train_per_class}: give {MIN_TRAIN_PER_CLASS} or more.")
        if self.held_out_where is not None:
            if not all(self.held_out_where.partition("=")):
                raise ConfigError(
                    f"held_out_where is {self.held_out_where!r}: give a field and a value, such as split=test."
                )
            if self.group_by is not None:
                raise ConfigError("held_out_where and group_by both determine the split: drop group_by.")
        check_batch_seconds(self.max_batch_seconds)


class ProbeScore(NamedTuple):
    """Accuracy on the held-out utterances, with its confidence interval."""

    accuracy: float
    """Share of the held-out utterances whose label is predicted."""

    low: float
    """Lower bound of the 95 % Wilson interval, which treats the utterances as independent."""

    high: float
    """Upper bound of that interval."""

    @classmethod
    def from_counts(cls, num_correct: int, num_scored: int) -> "ProbeScore":
        """Returns the score for `num_correct` correct predictions out of `num_scored`."""
        share, z2 = num_correct / num_scored, _NORMAL_QUANTILE**2 / num_scored
        centre = (share + z2 / 2) / (1 + z2)
        half = math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
        # The interval contains the share; by rounding, its bound could be 1e-16 beyond a share of 0 or 1.
        return cls(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """Scores of a probe, and the data behind them."""

    config: ProbeConfig
    model: str
    """Name of the model."""

    classes: dict[str, tuple[int, int]]
    """By class: number of training utterances, number of held-out utterances."""

    trained: list[ProbeScore]
    """Scores of the trained encoder by layer: the input of the first block, then the output of each block."""

    untrained: list[ProbeScore]
    """The same for the encoder with initial random weights."""

    trained_together: ProbeScore
    """Score of the concatenated layers of the trained encoder."""

    untrained_together: ProbeScore
    """Score of the concatenated layers of the untrained encoder."""

    log_mel: ProbeScore
    """Score of log-mel statistics."""

    chance: ProbeScore
    """Score of a classifier that always predicts the most frequent class."""

    num_unlabelled: int = 0
    """Number of utterances without the label or without the field of `group_by`."""

    excluded_classes: dict[str, str] = field(default_factory=dict)
    """Excluded classes with the reasons."""

    left_out: dict[str, int] = field(default_factory=dict)
    """Number of inputs without features by reason; each of them is a line of `rejected.jsonl`."""

    @property
    def num_train(self) -> int:
        """Number of training utterances."""
        return sum(train for train, _ in self.classes.values())

    @property
    def num_held_out(self) -> int:
        """Number of held-out utterances."""
        return sum(held for _, held in self.classes.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `probe.json`."""
        return {"kind": "probe", **plain(self), "num_train": self.num_train, "num_held_out": self.num_held_out}


def draw_probe(report: ProbeReport, picture: Path) -> None:
    """Plots accuracy over layers, trained and untrained, with 95 % intervals, log-mel statistics and chance level."""
    figure = new_figure(8.0, 4.8)
    axis = figure.subplots()
    draw_layers(axis, "trained", report.trained, scale=100.0)
    draw_layers(axis, "untrained", report.untrained, scale=100.0)
    together: dict[Contestant, ProbeScore] = {
        "trained": report.trained_together,
        "untrained": report.untrained_together,
    }
    for name, score in together.items():
        x = len(report.trained) - 1 + 0.4
        bars = [[100 * (score.accuracy - score.low)], [100 * (score.high - score.accuracy)]]
        label, colour = f"{name}, all layers together", COLOURS[name]
        axis.errorbar([x], [100 * score.accuracy], bars, fmt="D", markersize=5, color=colour, capsize=3, label=label)
    axis.axhline(100 * report.log_mel.accuracy, color=GREY, linestyle="-.", label="log-mel statistics")
    axis.axhline(100 * report.chance.accuracy, color=GREY, linestyle=":", label="chance: the most frequent class")
    label = report.config.label.replace("$", r"\$")  # an unescaped $ starts a formula
    title = f"{label}: {len(report.classes)} classes, {report.num_train} training utterances"
    axis.set_ylabel("accuracy on held-out utterances, %")
    finish_axes(axis, f"{title}, {report.num_held_out} held out", has_legend=True)
    figure.savefig(picture, dpi=110)
