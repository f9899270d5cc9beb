"""Settings and result of a probe: the configuration, the report, and its plot. matplotlib is imported for the plot."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nestmodel.evaluate.probe.report import COLOURS, draw_layers, plain
from nestmodel.evaluate.probe_config import Contestant, ProbeConfig
from nestmodel.figures import GREY, finish_axes, new_figure

_NORMAL_QUANTILE = 1.959964  # for an interval of 95 %


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
