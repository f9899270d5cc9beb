"""Mixtures: how often the cuts of each of several corpora are seen, from weights or hours and two temperatures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nestdata.config_checks import require
from nestdata.errors import ConfigError, PlanError
from nestdata.field_docs import with_field_docs
from nestdata.plan.lengths import Lengths

# Repeats per epoch are rounded to thousandths, so that plans ignore floating-point rounding.
REPEATS_UNIT = 1000


@runtime_checkable
class Mixture(Protocol):
    """The settings of a mixture, which `PlanConfig` and `MixtureStage` have."""

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Relative share of the hours for each corpus; None takes the hours of each corpus."""

    @property
    def temperature(self) -> float:
        """Inverse of the power to which the shares of corpora are raised, within a language if there are languages."""

    @property
    def language_temperature(self) -> float:
        """Inverse of the power to which the shares of languages are raised."""


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class MixtureStage:
    """A mixture of the corpora from an optimizer step on, up to the next stage. Nothing is taken from other stages."""

    from_step: int
    """First optimizer step of the stage, counted from 0."""

    weights: tuple[float, ...] | None = None
    """Relative share of the hours for each corpus, in order; None takes the hours of each corpus."""

    temperature: float = 1.0
    """Every share of a corpus is raised to the power 1/temperature, within its language if `plan.languages` is set."""

    language_temperature: float = 1.0
    """Every share of a language is raised to the power 1/language_temperature."""


def check_mixture(mixture: Mixture, languages: tuple[str, ...] | None, where: str) -> None:
    """Raises ConfigError if a setting of a mixture is out of range.

    Args:
        mixture: The settings.
        languages: Language of each corpus, if given.
        where: Path of the settings, such as `plan`.
    """
    weights = mixture.weights
    are_positive = weights is None or (bool(weights) and all(0 < weight < math.inf for weight in weights))
    require(are_positive, f"{where}.weights", weights, "a positive number for each corpus")
    require(mixture.temperature > 0, f"{where}.temperature", mixture.temperature, "a positive number")
    name, temperature = f"{where}.language_temperature", mixture.language_temperature
    require(temperature > 0, name, temperature, "a positive number")
    require(temperature == 1.0 or languages is not None, name, temperature, "the languages in plan.languages as well")


def check_stages(stages: Sequence[MixtureStage], languages: tuple[str, ...] | None) -> None:
    """Raises ConfigError if the stages of a plan are not in order, or a setting of one is out of range."""
    for number, stage in enumerate(stages):
        where = f"plan.stages[{number}]"
        before = stages[number - 1].from_step if number else -1
        expected = f"more than {before}, the first step of the stage before" if number else "0 or more"
        require(stage.from_step > before, f"{where}.from_step", stage.from_step, expected)
        check_mixture(stage, languages, where)


def repeats_per_epoch(
    corpora: Sequence[Lengths], mixture: Mixture, languages: tuple[str, ...] | None, where: str
) -> list[float]:
    """Returns how often each cut of each corpus is seen in an epoch, which has as many hours as all corpora together.

    Args:
        corpora: Lengths of the cuts of each corpus.
        mixture: Shares of the corpora.
        languages: Language of each corpus, if given.
        where: Path of the settings, such as `plan`.

    Raises:
        ConfigError: The number of weights or of languages is not that of the corpora, or shares cannot be computed.
        PlanError: One of several corpora is empty.
    """
    for name, values in ((f"{where}.weights", mixture.weights), ("plan.languages", languages)):
        if values is not None and len(values) != len(corpora):
            kind = "numbers" if values is mixture.weights else "names"
            raise ConfigError(
                f"{name} has {len(values)} {kind} for {len(corpora)} corpora. Give one for each, in order."
            )
    is_plain = mixture.weights is None and mixture.temperature == mixture.language_temperature == 1.0
    if len(corpora) == 1 or is_plain:
        return [1.0] * len(corpora)
    totals = [float(lengths.sum()) for lengths in corpora]
    if min(totals) <= 0:
        raise PlanError("one of several corpora is empty. Remove it.")
    try:
        shares = [share ** (1 / mixture.temperature) for share in mixture.weights or totals]
        if languages is not None:
            shares = _shares_in_languages(mixture.weights or totals, shares, languages, mixture.language_temperature)
        factor = sum(totals) / sum(shares)
        repeats = [factor * share / total for share, total in zip(shares, totals, strict=True)]
    except (OverflowError, ZeroDivisionError):
        repeats = [math.nan]
    if not all(0 < number < math.inf for number in repeats):
        raise ConfigError(f"{where}: weights and temperatures give shares that are too large or too small to compute.")
    return [max(1, round(REPEATS_UNIT * number)) / REPEATS_UNIT for number in repeats]


def _shares_in_languages(
    weights: Sequence[float], shares: Sequence[float], languages: Sequence[str], temperature: float
) -> list[float]:
    """Returns shares that keep their proportions within a language, and add up to the share of the language."""
    totals, sums = dict.fromkeys(languages, 0.0), dict.fromkeys(languages, 0.0)
    for weight, share, language in zip(weights, shares, languages, strict=True):
        totals[language] += weight
        sums[language] += share
    return [
        totals[language] ** (1 / temperature) * share / sums[language]
        for share, language in zip(shares, languages, strict=True)
    ]
