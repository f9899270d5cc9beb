"""Settings of features and probes. The module imports no heavy package, so that help of commands starts fast."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nestdata.config_checks import require, require_at_least
from nestdata.field_docs import with_field_docs
from nestmodel.config import FeatureType
from nestmodel.errors import ConfigError

Layers = Literal["all", "last"] | Sequence[int]
"""Outputs of an encoder by number: 0 is the input of the first block, i the output of the i-th block."""

Contestant = Literal["trained", "untrained", "log_mel"]
"""Features that a probe compares. `trained`: all layers of the encoder. `untrained`: all layers of an encoder with
initial random weights, which reads the same input and whose batch norm is calibrated on the training utterances of the
probe, so the difference was learned. `log_mel`: log-mel frames without an encoder."""

BASELINES: tuple[Contestant, ...] = ("untrained", "log_mel")

MIN_WINDOW_S = 64.0
"""Shortest window of long audio, in seconds; half of it is context."""

MIN_TRAIN_PER_CLASS = 2
"""Minimum number of training utterances of a class; smaller classes are excluded."""


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractConfig:
    """Which encoder outputs are written, and how they are stored."""

    layers: Layers = "last"
    """Layers to keep: all, last, or numbers such as 0 4 16, where 0 is the input of the first block."""

    dtype: FeatureType = "float32"
    """Precision of the feature files.

    The encoder computes in float32."""

    max_batch_seconds: float = 120.0
    """Maximum audio per batch in seconds, padding included.

    A longer utterance is a batch by itself."""

    window_seconds: float | None = None
    """Encode longer audio in windows of this length, of which 16 s on both sides are context.

    None takes the length whose attention needs 4 GiB, such as 463 s for large, so that audio of any length has
    features."""

    device: str = "auto"
    """Device such as cpu or cuda:1; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        check_batch_seconds(self.max_batch_seconds)
        check_window(self.window_seconds)


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """The label that is predicted, and the split into training and held-out utterances."""

    label: str
    """Label to predict: language, speaker, or any field of the manifest."""

    held_out: float = 0.25
    """Share of the utterances of each class that is held out and scored, in (0, 1); the others are for training."""

    held_out_where: str | None = None
    """Hold out the utterances with this value instead, such as split=test."""

    group_by: str | None = None
    """Keep utterances with the same value of this field, such as speaker, on one side of the split.

    None splits single utterances."""

    train_per_class: int | None = None
    """Maximum number of training utterances per class.

    None uses all. With many utterances, an easy label can be predicted from any features, so that all encoders have the
    same score."""

    seed: int = 0
    """Seed of the split and of the untrained encoder."""

    max_batch_seconds: float = 120.0
    """Maximum audio per batch in seconds, padding included."""

    device: str = "auto"
    """Device such as cpu or cuda:1; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        _check_share(self)
        require_at_least(MIN_TRAIN_PER_CLASS, "", self, "train_per_class")
        if self.held_out_where is not None:
            is_pair = all(self.held_out_where.partition("="))
            require(is_pair, "held_out_where", self.held_out_where, "a field and a value, such as split=test")
            if self.group_by is not None:
                raise ConfigError("held_out_where and group_by both determine the split: drop group_by.")
        check_batch_seconds(self.max_batch_seconds)


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class CtcProbeConfig:
    """How the heads of a content probe are trained. All settings hold for every contestant."""

    held_out: float = 0.1
    """Share of the training utterances that selects learning rate and epoch, in (0, 1)."""

    group_by: str | None = None
    """Keep utterances with the same value of this field, such as speaker, on one side of the split.

    None keeps the utterances of a recording together."""

    baselines: tuple[Contestant, ...] = BASELINES
    """What the encoder is compared with, or none.

    The batch norm of the untrained encoder is calibrated on the training utterances."""

    learning_rates: tuple[float, ...] = (0.005, 0.02, 0.08)
    """Learning rates to choose from.

    For Adam. Each contestant gets the one with its lowest held-out error rate, the mean over all
    seeds."""

    max_epochs: int = 30
    """Maximum number of epochs.

    The learning rate falls linearly to 0 over these passes over the training utterances."""

    probe_seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the heads.

    They determine the initial weights and the order of the utterances."""

    seed: int = 0
    """Seed of the split and of the untrained encoder.

    It also seeds the bootstrap draws."""

    max_batch_seconds: float = 120.0
    """Maximum audio per batch in seconds, padding included."""

    device: str = "auto"
    """Device such as cpu or cuda:1; auto takes a GPU if there is one.

    Heads are trained on the CPU."""

    def __post_init__(self) -> None:
        rates, seeds, baselines = self.learning_rates, self.probe_seeds, self.baselines
        _check_share(self)
        are_valid = len(set(baselines)) == len(baselines) and set(baselines) <= set(BASELINES)
        require(are_valid, "baselines", baselines, f"each at most once of {', '.join(BASELINES)}")
        are_valid = len(rates) == len(set(rates)) > 0 and min(rates) > 0
        require(are_valid, "learning_rates", rates, "different positive numbers")
        require(self.max_epochs >= 1, "max_epochs", self.max_epochs, "1 or more")
        require(len(seeds) == len(set(seeds)) > 0, "probe_seeds", seeds, "different seeds")
        check_batch_seconds(self.max_batch_seconds)


def check_window(window_seconds: float | None) -> None:
    """Raises ConfigError for windows that are too short."""
    is_valid = window_seconds is None or MIN_WINDOW_S <= window_seconds < math.inf
    require(is_valid, "window_seconds", window_seconds, f"at least {MIN_WINDOW_S:g} s")


def check_batch_seconds(max_batch_seconds: float) -> None:
    """Raises ConfigError unless the limit is positive."""
    require(max_batch_seconds > 0, "max_batch_seconds", max_batch_seconds, "a positive number of seconds")


def _check_share(config: Any) -> None:
    require(0.0 < config.held_out < 1.0, "held_out", config.held_out, "a share between 0 and 1")
