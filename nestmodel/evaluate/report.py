"""What is asked of a probe, and what it has found: as a file, and as a picture. matplotlib is imported to draw."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nestmodel.errors import ConfigError
from nestmodel.evaluate.classifier import ProbeScore
from nestmodel.evaluate.encode import check_batch_seconds
from nestmodel.figures import BLUE, GREY, ORANGE, finish_axes, new_figure

LEAST_IN_TRAINING = 2
"""Utterances of a class without which it cannot be learned."""

_SINGLE_SCORES = ("trained_together", "untrained_together", "log_mel", "chance")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """What is predicted, and how the utterances are divided."""

    label: str
    """Name of the label: `language`, `speaker`, `text`, or any other field of the manifest."""

    held_out: float = 0.25
    """Share of the utterances of each class that is scored, in (0, 1); the others are trained on."""

    held_out_where: str | None = None
    """A field and its value, such as `split=test`: what is scored instead of a share of each class."""

    group_by: str | None = None
    """A field, such as `speaker`, all utterances of one value of which are on one side; None splits utterances."""

    train_per_class: int | None = None
    """At most so many utterances of a class are trained on; None takes all. With all, easy labels can be read off
    anything, and encoders look alike."""

    seed: int = 0
    """Of the split, and of the fresh weights of the untrained encoder."""

    max_batch_seconds: float = 120.0
    """Audio in a batch, padding included."""

    device: str = "auto"
    """Where the encoder runs; `auto` takes a GPU where there is one."""

    def __post_init__(self) -> None:
        if not 0.0 < self.held_out < 1.0:
            raise ConfigError(f"held_out is {self.held_out:g}: expected a share between 0 and 1.")
        if self.train_per_class is not None and self.train_per_class < LEAST_IN_TRAINING:
            raise ConfigError(f"train_per_class is {self.train_per_class}: give {LEAST_IN_TRAINING} or more.")
        if self.held_out_where is not None:
            if not all(self.held_out_where.partition("=")):
                raise ConfigError(
                    f"held_out_where is {self.held_out_where!r}: give a field and a value, as split=test."
                )
            if self.group_by is not None:
                raise ConfigError("held_out_where says which side each utterance is on: drop group_by.")
        check_batch_seconds(self.max_batch_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """What a probe found, and on what."""

    config: ProbeConfig
    model: str
    classes: dict[str, tuple[int, int]]
    """Utterances that were trained on and held out, by class."""

    trained: list[ProbeScore]
    """By layer: the input of the first block, then the output of each."""

    untrained: list[ProbeScore]
    """The same with the weights that training starts from."""

    trained_together: ProbeScore
    """All layers of the trained encoder side by side."""

    untrained_together: ProbeScore
    """All layers of the untrained one."""

    log_mel: ProbeScore
    """The same of log mels."""

    chance: ProbeScore
    """Always the most frequent class."""

    num_unlabelled: int = 0
    """Utterances without the label, or without the field of `group_by`."""

    excluded_classes: dict[str, str] = field(default_factory=dict)
    """Classes that could not take part, and why."""

    left_out: dict[str, int] = field(default_factory=dict)
    """Number of inputs whose audio could not be used by reason; listed in `rejected.jsonl`."""

    @property
    def num_train(self) -> int:
        """Utterances that were trained on."""
        return sum(train for train, _ in self.classes.values())

    @property
    def num_held_out(self) -> int:
        """Utterances that were scored."""
        return sum(held for _, held in self.classes.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns what `probe.json` holds."""
        scores = {name: [score._asdict() for score in getattr(self, name)] for name in ("trained", "untrained")}
        return {
            "kind": "probe",
            **asdict(self),
            **scores,
            **{name: getattr(self, name)._asdict() for name in _SINGLE_SCORES},
            "num_train": self.num_train,
            "num_held_out": self.num_held_out,
        }


def draw_probe(report: ProbeReport, picture: Path) -> None:
    """Draws accuracy over layers: trained as a line with its interval, untrained dashed, log mels and chance level."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8.0, 4.8)
    axis = figure.subplots()
    layers = np.arange(len(report.trained))
    for name, scores, colour, style in (
        ("trained", report.trained, BLUE, "-"),
        ("untrained", report.untrained, ORANGE, "--"),
    ):
        accuracy, low, high = 100 * np.array(scores).T
        axis.plot(layers, accuracy, style, color=colour, marker="o", markersize=3, label=name)
        axis.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
    for name, score, colour in (
        ("trained, all layers together", report.trained_together, BLUE),
        ("untrained, all layers together", report.untrained_together, ORANGE),
    ):
        place = len(layers) - 1 + 0.4
        bars = [[100 * (score.accuracy - score.low)], [100 * (score.high - score.accuracy)]]
        axis.errorbar([place], [100 * score.accuracy], bars, fmt="D", markersize=5, color=colour, capsize=3, label=name)
    axis.axhline(100 * report.log_mel.accuracy, color=GREY, linestyle="-.", label="log-mel statistics")
    axis.axhline(100 * report.chance.accuracy, color=GREY, linestyle=":", label="chance: the most frequent class")
    label = report.config.label.replace("$", r"\$")  # which would begin a formula
    title = f"{label}: {len(report.classes)} classes, {report.num_train} utterances to train on"
    axis.set_xlabel("layer (0 is the input of the first block)")
    axis.set_ylabel("held-out utterances recognised, %")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish_axes(axis, f"{title}, {report.num_held_out} held out", has_legend=True)
    figure.savefig(picture, dpi=110)
