"""Mixtures: how often the cuts of each of several corpora are seen, from weights or hours and two temperatures."""

import math
from collections.abc import Sequence

from nestdata.errors import ConfigError, PlanError
from nestdata.plan.lengths import Lengths
from nestdata.plan.plan_config import MixtureStage, PlanConfig

# Repeats per epoch are rounded to thousandths, so that plans ignore floating-point rounding.
REPEATS_UNIT = 1000


def repeats_per_epoch(
    corpora: Sequence[Lengths], mixture: PlanConfig | MixtureStage, languages: tuple[str, ...] | None, where: str
) -> list[float]:
    """Returns how often each cut of each corpus is seen in an epoch, which has as many hours as all corpora together.

    Args:
        corpora: Lengths of the cuts of each corpus.
        mixture: Shares of the corpora.
        languages: Language of each corpus, if given.
        where: Path of the settings, such as `plan`.

    Raises:
        ConfigError: The number of weights or of languages is not the number of corpora, or shares cannot be computed.
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


def num_positions(lengths: Lengths, repeats: float) -> int:
    """Returns the positions that a corpus fills in an epoch, if each of its cuts is seen `repeats` times."""
    return max(1, len(lengths) * round(REPEATS_UNIT * repeats) // REPEATS_UNIT)


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
