from dataclasses import dataclass

import pytest

from nestdata import ConfigError
from nestdata.config_checks import nearest_name_hint, require_share


@dataclass
class Config:
    count: int | None = 3
    share: float = 0.5
    bounds: tuple[float, float] = (0.0, 1.0)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_require_share_rejects_values_outside_zero_to_one(share: float) -> None:
    with pytest.raises(ConfigError, match=r"^mix\.share is (-0\.1|1\.1|nan): expected a share in \[0, 1\]\.$"):
        require_share("mix", Config(share=share), "share")


def test_require_share_rejects_one_if_it_must_be_below_one() -> None:
    with pytest.raises(ConfigError, match=r"^mix\.share is 1\.0: expected a share in \[0, 1\)\.$"):
        require_share("mix", Config(share=1.0), "share", below_one=True)


def test_nearest_name_hint_suggests_the_most_similar_name() -> None:
    assert nearest_name_hint("Gian", ["Trim", "Gain"]) == "; the nearest is 'Gain'"
    assert nearest_name_hint("Gian", ["Trim", "Gain"], min_similarity=0.9) == ""
    assert nearest_name_hint("Gian", []) == ""
