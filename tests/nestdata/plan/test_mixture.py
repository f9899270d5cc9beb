from typing import Any

import numpy as np
import pytest

from nestdata import BatchPlan, ConfigError, MixtureStage, PlanConfig

RATE = 100


def repeats(hours: list[int], **config: Any) -> list[float]:
    corpora = [np.full(number, 100) for number in hours]
    return BatchPlan(
        corpora, RATE, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=2, **config)
    ).repeats_per_epoch


def shares(hours: list[int], **config: Any) -> list[float]:
    products = np.array(hours) * repeats(hours, **config)
    return (products / products.sum()).tolist()


def test_languages_without_temperatures_change_nothing() -> None:
    assert repeats([900, 100, 500], languages=("en", "en", "sw")) == [1.0, 1.0, 1.0]


def test_the_temperature_of_languages_applies_to_the_hours_of_each_language() -> None:
    # English has 1600 and Swahili 400, which become 40 to 20; the corpora of English keep 9 to 7.
    found = shares([900, 700, 400], languages=("en", "en", "sw"), language_temperature=2.0)
    assert found == pytest.approx([2 / 3 * 9 / 16, 2 / 3 * 7 / 16, 1 / 3], abs=1e-3)


def test_the_temperature_of_corpora_applies_within_each_language() -> None:
    # The corpora of English become 30 to 20; the shares of the languages stay 1300 to 700.
    found = shares([900, 400, 700], languages=("en", "en", "sw"), temperature=2.0)
    assert found == pytest.approx([0.65 * 0.6, 0.65 * 0.4, 0.35], abs=1e-3)


def test_both_temperatures_apply_to_weights_as_well() -> None:
    config = {"languages": ("en", "sw", "en"), "weights": (9.0, 4.0, 16.0)}
    found = shares([500, 300, 200], temperature=2.0, language_temperature=2.0, **config)
    expected = np.array([5.0 * 3 / 7, 2.0, 5.0 * 4 / 7]) / 7
    assert found == pytest.approx(expected.tolist(), abs=1e-3)


def test_one_language_for_each_corpus_needs_only_the_temperature_of_languages() -> None:
    languages = ("en", "sw")
    warm = repeats([900, 100], languages=languages, language_temperature=3.0)
    assert warm == repeats([900, 100], temperature=3.0)
    assert warm == repeats([900, 100], languages=languages, temperature=7.0, language_temperature=3.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": (1.0,)}, r"plan\.weights has 1 numbers for 2 corpora\. Give one for each, in order\."),
        ({"languages": ("en", "sw", "cs")}, r"plan\.languages has 3 names for 2 corpora"),
        (
            {"stages": (MixtureStage(from_step=4, weights=(1.0,) * 3),)},
            r"plan\.stages\[0\]\.weights has 3 numbers for 2 corpora",
        ),
    ],
)
def test_another_number_of_corpora_is_a_mistake_in_the_configuration(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        repeats([50, 50], **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e-320},
        {"weights": (1e-200, 1e-200), "temperature": 0.5},
    ],
)
def test_shares_that_cannot_be_computed_are_a_mistake_in_the_configuration(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="plan: weights and temperatures give shares that are too large or too small"):
        repeats([50, 50], **changes)
