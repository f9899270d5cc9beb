"""Settings of the probes. The module imports no heavy package, so that `nestmodel probe --help` starts fast."""

from dataclasses import dataclass
from typing import Literal

from nestdata.config_checks import require
from nestdata.field_docs import with_field_docs
from nestmodel.errors import ConfigError
from nestmodel.evaluate.features.config import check_batch_seconds

MIN_TRAIN_PER_CLASS = 2
"""Minimum number of training utterances of a class; smaller classes are excluded."""

Contestant = Literal["trained", "untrained", "log_mel"]
"""`trained`: all layers of the encoder. `untrained`: the same of an encoder with initial random weights, which reads
the same input, so the difference was learned. `log_mel`: log-mel frames without an encoder."""

BASELINES: tuple[Contestant, ...] = ("untrained", "log_mel")


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


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class CtcProbeConfig:
    """How the heads of a content probe are trained. All settings hold for every contestant."""

    held_out: float = 0.1
    """Share of the training utterances that selects learning rate and epoch, in (0, 1)."""

    group_by: str | None = None
    """Keep utterances with the same value of this field, such as speaker, on one side of the split.

    None keeps the utterances of a recording together."""

    labels_per_frame: int | None = None
    """Labels predicted from each encoder frame.

    In temporal order. None takes the smallest number that gives 25 labels per second."""

    baselines: tuple[Contestant, ...] = BASELINES
    """What the encoder is compared with, or none."""

    learning_rates: tuple[float, ...] = (0.005, 0.02, 0.08)
    """Learning rates to choose from.

    For Adam. Each contestant gets the one with its lowest held-out error rate, the mean over all
    seeds."""

    max_epochs: int = 30
    """Maximum number of epochs.

    The learning rate falls linearly to 0 over these passes over the training utterances."""

    patience: int = 30
    """Epochs without improvement.

    Training ends when the held-out error rate has not improved for this number of epochs. By default, it does not end
    early: the error rate often falls only when the learning rate is low."""

    probe_seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the heads.

    They determine the initial weights and the order of the utterances."""

    seed: int = 0
    """Seed of the split and of the untrained encoder.

    It also seeds the bootstrap draws and the examples."""

    max_batch_seconds: float = 120.0
    """Maximum audio per batch in seconds, padding included."""

    device: str = "auto"
    """Device such as cpu or cuda:1; auto takes a GPU if there is one.

    Heads are trained on the CPU."""

    def __post_init__(self) -> None:
        def check(is_valid: bool, name: str, expected: str) -> None:
            require(is_valid, name, getattr(self, name), expected)

        rates, seeds = self.learning_rates, self.probe_seeds
        check(0.0 < self.held_out < 1.0, "held_out", "a share between 0 and 1")
        check(self.labels_per_frame is None or self.labels_per_frame >= 1, "labels_per_frame", "1 or more")
        check(len(rates) == len(set(rates)) > 0 and min(rates) > 0, "learning_rates", "different positive numbers")
        is_valid = len(set(self.baselines)) == len(self.baselines) and set(self.baselines) <= set(BASELINES)
        check(is_valid, "baselines", f"each at most once of {', '.join(BASELINES)}")
        check(self.max_epochs >= 1, "max_epochs", "1 or more")
        check(self.patience >= 1, "patience", "1 or more")
        check(len(seeds) == len(set(seeds)) > 0, "probe_seeds", "different seeds")
        check_batch_seconds(self.max_batch_seconds)
