"""The reports of probes: the scores of the contestants, as data for `probe.json` and as text for `report.md`."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nestmodel.evaluate.config import Contestant, CtcProbeConfig, ProbeConfig
from nestmodel.evaluate.error_rates import ErrorRate, Estimate, percent
from nestmodel.evaluate.text import NORMALISATION
from nestmodel.formats.model_card import escaped

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
    """The same for the encoder with initial random weights."""

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

    def to_markdown(self) -> str:
        """Returns the content of `report.md`."""
        return "\n".join(_label_lines(self)) + "\n"


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
    """Error rate of the trained encoder minus that of a baseline, on the same utterances; below 0 it is better."""

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
    intervals_over: str
    """What the bootstrap draws, such as "10 groups of `scene`"."""

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

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `probe.json`."""
        return {"kind": "probe", "task": "ctc", "normalisation": list(NORMALISATION), **_plain(self)}

    def to_markdown(self) -> str:
        """Returns the content of `report.md`."""
        return "\n".join(_ctc_lines(self)) + "\n"


def write_report(report: ProbeReport | CtcProbeReport, directory: Path) -> None:
    """Writes `probe.json` and `report.md`."""
    content = json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n"
    (directory / "probe.json").write_text(content, encoding="utf-8")
    (directory / "report.md").write_text(report.to_markdown(), encoding="utf-8")


def _label_lines(report: ProbeReport) -> Iterator[str]:
    yield f"# Probe of {report.model or 'a model'}: {escaped(report.config.label)}"
    yield ""
    yield (
        f"Accuracy in % on {report.num_held_out} held-out utterances, with 95 % Wilson intervals. Logistic regression "
        "on the mean and the standard deviation over the frames of an utterance, fitted to "
        f"{report.num_train} training utterances; {len(report.classes)} classes. Seed: {report.config.seed}."
    )
    yield ""
    scores = {
        "trained": report.trained,
        "untrained": report.untrained,
        "log-mel": report.log_mel,
        "chance: the most frequent class": report.chance,
    }
    yield from _table("features | accuracy", (f"{name} | {percent(score)}" for name, score in scores.items()))
    classes = (f"{name} | {train} | {held_out}" for name, (train, held_out) in report.classes.items())
    yield from _table("class | training | held out", classes)
    for name, reason in report.excluded_classes.items():
        yield f"- excluded class {escaped(name)}: {reason}"
    yield f"- utterances without the label or its group: {report.num_unlabelled}"
    yield f"- unusable utterances: {_counts(report.left_out)}"


def _ctc_lines(report: CtcProbeReport) -> Iterator[str]:
    config = report.config
    yield f"# Content probe of {report.model or 'a model'}"
    yield ""
    yield (
        "A linear CTC head on frozen features, with learned weights of the layers and greedy decoding. Error rates on "
        f"{report.num_test} test utterances in %, with 95 % bootstrap intervals over {report.intervals_over}. The "
        f"errors of all heads are added up; their seeds: {', '.join(map(str, config.probe_seeds))}."
    )
    yield ""
    yield from _table("features | CER | WER | CER by seed | learning rate", map(_error_row, report.contestants))
    if report.differences:
        yield "Trained minus baseline, in percentage points (paired bootstrap); below 0 the trained encoder is better:"
        yield ""
        rows = (
            f"{_shown(found.baseline)} | {percent(found.characters)} | {percent(found.words)}"
            for found in report.differences
        )
        yield from _table("baseline | CER | WER", rows)
        rates = config.learning_rates
        at_an_edge = [score.name for score in report.contestants if score.learning_rate in (min(rates), max(rates))]
        if at_an_edge:
            yield (
                "**The learning rate may explain a part of these differences**: the lowest or the highest one was best "
                f"for {', '.join(map(_shown, at_an_edge))}. Give rates beyond it with `--learning-rates`."
            )
            yield ""
    yield (
        f"- {report.num_training} utterances for training, and {report.num_held_out} held out, which select learning "
        f"rate and epoch of {config.max_epochs}; seed {config.seed}"
    )
    yield f"- labels per frame of {1000 / report.frame_rate_hz:.0f} ms: {report.labels_per_frame}"
    fast = report.num_too_fast
    yield f"- too many characters for their frames: {fast['training']} left out of training, {fast['test']} scored"
    yield f"- alphabet, from the training texts: `{report.alphabet}`"
    yield from (f"- unusable utterances, {side}: {_counts(reasons)}" for side, reasons in report.left_out.items())
    yield f"- texts: {'; '.join(NORMALISATION)}"


def _error_row(score: ContestantScore) -> str:
    by_seed = ", ".join(f"{100 * of_seed.rate:.1f}" for of_seed in score.by_seed.values())
    rates = f"{percent(score.characters)} | {percent(score.words)}"
    return f"{_shown(score.name)} | {rates} | {by_seed} | {score.learning_rate:g}"


def _shown(name: Contestant) -> str:
    return name.replace("_", "-")


def _counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"


def _table(columns: str, rows: Iterable[str]) -> Iterator[str]:
    """Yields the lines of a Markdown table and an empty line. Cells are separated by " | "."""
    yield f"| {columns} |"
    yield "|" + "---|" * len(columns.split(" | "))
    yield from (f"| {row} |" for row in rows)
    yield ""


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
