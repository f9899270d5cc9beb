"""The reports of probes: the scores of the contestants, and what they were computed from."""

import json
import math
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nestmodel.evaluate.error_rates import ErrorRate, Estimate
from nestmodel.evaluate.evaluation_config import Contestant, CtcProbeConfig, ProbeConfig
from nestmodel.evaluate.text import NORMALISATION

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
    """Scores of a probe of labels, and the data behind them."""

    config: ProbeConfig
    model: str
    """Name of the model."""

    classes: dict[str, tuple[int, int]]
    """By class: number of training utterances, number of held-out utterances."""

    trained: ProbeScore
    """Score of all layers of the trained encoder together."""

    untrained: ProbeScore
    """The same for the encoder with initial random weights and calibrated batch norm."""

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
        numbers = {"num_train": self.num_train, "num_held_out": self.num_held_out}
        return {"kind": "probe", "task": "labels", **_plain(self), **numbers}


@dataclass(frozen=True, kw_only=True, slots=True)
class ContestantScore:
    """Result of one feature set."""

    name: Contestant
    learning_rate: float
    by_seed: dict[int, ErrorRate]
    """Character error rate over the test utterances of each head."""

    characters: ErrorRate
    """Error rate over the test utterances, with the errors of all seeds added up."""

    words: ErrorRate


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Error rate of the trained encoder minus a baseline's, on the same utterances; below 0, the encoder is better."""

    baseline: Contestant
    characters: Estimate
    words: Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class CtcProbeReport:
    """Scores of a content probe, and what they were computed from."""

    config: CtcProbeConfig
    model: str
    alphabet: str
    """Characters of the training texts."""

    frame_rate_hz: float
    labels_per_frame: int
    """Number of labels that heads predict from each encoder frame."""

    num_training: int
    num_held_out: int
    num_test: int
    num_too_fast: dict[str, int]
    """Utterances with more characters than label frames: of the training corpus, which are left out; of the test
    corpus, which are scored."""

    contestants: list[ContestantScore]
    differences: list[Difference]
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of unusable utterances by reason, of the training and of the test corpus."""

    def score(self, name: Contestant) -> ContestantScore:
        """Returns the score of a contestant."""
        return next(score for score in self.contestants if score.name == name)

    @property
    def at_an_edge(self) -> list[Contestant]:
        """Contestants for which the lowest or the highest learning rate was best: differences may come from that."""
        edges = (min(self.config.learning_rates), max(self.config.learning_rates))
        return [score.name for score in self.contestants if score.learning_rate in edges]

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `probe.json`."""
        return {"kind": "probe", "task": "ctc", "normalisation": list(NORMALISATION), **_plain(self)}


def write_report(report: ProbeReport | CtcProbeReport, directory: Path) -> None:
    """Writes `probe.json`."""
    content = json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n"
    (directory / "probe.json").write_text(content, encoding="utf-8")


def _plain(value: Any) -> Any:
    """Returns a report with its dataclasses and named tuples as dictionaries."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    is_named = isinstance(value, tuple) and type(value) is not tuple
    if is_named:
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value
