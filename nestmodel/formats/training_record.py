"""What a checkpoint says about the training of its weights, beside the settings that a resumed run must have.

Checkpoints come from anywhere: a value of another type than expected is unknown, and all text may be hostile.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

RECORD_KEY = "nest_training"
"""Key of the record in a checkpoint."""

SETTINGS_KEY = "nest_settings"
"""Key of the settings of the run in a checkpoint: text by dotted name."""

METRICS = ("loss", "token_entropy", "accuracy")
"""The metrics that are recorded, without the prefix `train_` or `val_`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusRecord:
    """One corpus of a run."""

    name: str
    """Name of the directory, without its location."""

    hours: float
    num_cuts: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecord:
    """What is known about a run. None and empty fields are unknown."""

    steps: int | None = None
    """Optimizer steps."""

    version: str | None = None
    """Version of this project."""

    started_from: str | None = None
    """Name of the file whose weights the run started with, without its location; None also if it had new weights."""

    corpora: tuple[CorpusRecord, ...] = ()
    """The speech."""

    noise: tuple[CorpusRecord, ...] = ()
    """The noise; also empty if there was none."""

    val_corpora: tuple[CorpusRecord, ...] = ()
    """The speech of the validation; also empty if there was none."""

    train_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last step; see `METRICS`."""

    val_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last validation."""

    val_step: int | None = None
    """Step after which the last validation was."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the run by dotted name, as text."""

    def stored(self) -> dict[str, Any]:
        """Returns what a checkpoint stores under `RECORD_KEY`; steps and settings are stored elsewhere."""
        values = asdict(self)
        del values["steps"], values["settings"]
        if self.started_from is None:
            del values["started_from"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def record_of(entry: Callable[[str], Any]) -> TrainingRecord | None:
    """Returns the record of a checkpoint that a run has written; None for any other file, whose training is unknown.

    Args:
        entry: Returns what a file holds under a key, which may have any type, or None.
    """
    settings = _mapping(entry(SETTINGS_KEY))
    if not settings:
        return None
    stored = _mapping(entry(RECORD_KEY))
    return TrainingRecord(
        steps=_count(entry("global_step")),
        version=_text(stored.get("version")),
        started_from=_text(stored.get("started_from")),
        corpora=_corpora(stored.get("corpora")),
        noise=_corpora(stored.get("noise")),
        val_corpora=_corpora(stored.get("val_corpora")),
        train_metrics=_metrics(stored.get("train_metrics")),
        val_metrics=_metrics(stored.get("val_metrics")),
        val_step=_count(stored.get("val_step")),
        settings={str(name): str(value) for name, value in settings.items()},
    )


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _metrics(value: object) -> dict[str, float]:
    values = _mapping(value)
    return {name: values[name] for name in METRICS if type(values.get(name)) is float and math.isfinite(values[name])}


def _corpora(value: object) -> tuple[CorpusRecord, ...]:
    found = []
    for item in value if isinstance(value, list) else ():
        entry = _mapping(item)
        name, hours, fingerprint = _text(entry.get("name")), entry.get("hours"), _text(entry.get("fingerprint"))
        num_cuts = _count(entry.get("num_cuts"))
        if name is None or fingerprint is None or num_cuts is None or type(hours) is not float:
            continue
        found.append(CorpusRecord(name=name, hours=hours, num_cuts=num_cuts, fingerprint=fingerprint))
    return tuple(found)
