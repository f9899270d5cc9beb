from dataclasses import dataclass

import pytest

from nestdata import ConfigError
from nestdata.config_checks import nearest_name_hint, require, require_at_least, require_bounds, require_share


@dataclass
class Config:
    count: int | None = 3
    share: float = 0.5
    bounds: tuple[float, float] = (0.0, 1.0)


def test_require_names_the_field_its_value_and_what_was_expected() -> None:
    require(True, "mix.count", 3, "an even number")
    with pytest.raises(ConfigError, match=r"^mix\.count is 3: expected an even number\.$"):
        require(False, "mix.count", 3, "an even number")


def test_require_at_least_accepts_the_minimum_and_skips_none() -> None:
    require_at_least(3, "mix", Config(), "count")
    require_at_least(3, "mix", Config(count=None), "count")
    with pytest.raises(ConfigError, match=r"^mix\.count is 3: expected 4 or more\.$"):
        require_at_least(4, "mix", Config(), "count")


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_require_share_accepts_zero_to_one(share: float) -> None:
    require_share("mix", Config(share=share), "share")


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_require_share_rejects_values_outside_zero_to_one(share: float) -> None:
    with pytest.raises(ConfigError, match=r"^mix\.share is (-0\.1|1\.1|nan): expected a share in \[0, 1\]\.$"):
        require_share("mix", Config(share=share), "share")


def test_require_share_rejects_one_if_it_must_be_below_one() -> None:
    with pytest.raises(ConfigError, match=r"^mix\.share is 1\.0: expected a share in \[0, 1\)\.$"):
        require_share("mix", Config(share=1.0), "share", below_one=True)


def test_require_bounds_requires_the_lower_bound_first() -> None:
    require_bounds("mix", Config(bounds=(1.0, 1.0)), "bounds")
    with pytest.raises(ConfigError, match=r"^mix\.bounds is \(2\.0, 1\.0\): expected the lower bound first\.$"):
        require_bounds("mix", Config(bounds=(2.0, 1.0)), "bounds")


def test_field_without_a_section_is_named_alone() -> None:
    with pytest.raises(ConfigError, match=r"^count is 3: expected 4 or more\.$"):
        require_at_least(4, "", Config(), "count")


def test_nearest_name_hint_suggests_the_most_similar_name() -> None:
    assert nearest_name_hint("Gian", ["Trim", "Gain"]) == "; the nearest is 'Gain'"
    assert nearest_name_hint("Gian", ["Trim", "Gain"], min_similarity=0.9) == ""
    assert nearest_name_hint("Gian", []) == ""
