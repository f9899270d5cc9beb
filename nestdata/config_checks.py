"""Checks that configuration dataclasses call on construction, and the hint for a misspelled name.

Every failed check raises ConfigError, with one message format: the field, its value, and the expected value.
"""

import difflib
import math
import reprlib
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import get_type_hints

from nestdata.errors import ConfigError

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 4, 8, 8, 8
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: object) -> str:
    """Returns a shortened `repr` of a value for a message; remains fast if parts of the value are shared many times."""
    return _SHORT.repr(value)


def require(condition: bool, field: str, value: object, expected: str) -> None:
    """Raises ConfigError unless a condition holds.

    Args:
        condition: Whether the value is valid.
        field: Path of the setting, such as `mix.prob`.
        value: The value that was given.
        expected: Description of valid values, such as "a share in [0, 1]".
    """
    if not condition:
        raise ConfigError(f"{field} is {shown(value)}: expected {expected}.")


def require_instance(field: str, value: object, cls: type, *, or_none: bool = False) -> None:
    """Raises ConfigError unless a value is an object of a class; a mapping or the class itself is a common mistake."""
    require(isinstance(value, cls) or (or_none and value is None), field, value, f"an object of {cls.__name__}")


def require_parts(section: str, config: object) -> None:
    """Raises ConfigError unless every field that is annotated with a dataclass holds one; nested fields as well.

    Args:
        section: Path of the configuration, as for `require_at_least`.
        config: The configuration.
    """
    for name, hint in get_type_hints(type(config)).items():
        if is_dataclass(hint) and isinstance(hint, type):
            require_instance(_path(section, name), getattr(config, name), hint)
            require_parts(_path(section, name), getattr(config, name))


def require_at_least(minimum: int | float, section: str, config: object, *names: str) -> None:
    """Raises ConfigError unless every named field of a configuration is `minimum` or more.

    Args:
        minimum: Smallest valid value.
        section: Path of the configuration, such as `mix`; the message names the field as `mix.NAME`. May be empty.
        config: The configuration.
        names: Fields to check. A field that is None is skipped.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None:
            require(value >= minimum, _path(section, name), value, f"{minimum:g} or more")


def require_at_most(maximum: int | float, section: str, config: object, *names: str) -> None:
    """Raises ConfigError unless every named field of a configuration is `maximum` or less.

    Args:
        maximum: Largest valid value.
        section: Path of the configuration, as for `require_at_least`.
        config: The configuration.
        names: Fields to check.
    """
    for name in names:
        value = getattr(config, name)
        require(value <= maximum, _path(section, name), value, f"{maximum:g} or less")


def require_share(section: str, config: object, *names: str, below_one: bool = False) -> None:
    """Raises ConfigError unless every named field of a configuration is a share in [0, 1].

    Args:
        section: Path of the configuration, as for `require_at_least`.
        config: The configuration.
        names: Fields to check.
        below_one: Whether 1 itself is invalid.
    """
    interval = "[0, 1)" if below_one else "[0, 1]"
    for name in names:
        value = getattr(config, name)
        is_valid = 0.0 <= value < 1.0 if below_one else 0.0 <= value <= 1.0
        require(is_valid, _path(section, name), value, f"a share in {interval}")


def require_bounds(section: str, config: object, *names: str) -> None:
    """Raises ConfigError unless every named field is a pair of finite bounds, the lower one first.

    Args:
        section: Path of the configuration, as for `require_at_least`.
        config: The configuration.
        names: Fields to check.
    """
    for name in names:
        low, high = getattr(config, name)
        require(low <= high, _path(section, name), (low, high), "the lower bound first")
        require(math.isfinite(low) and math.isfinite(high), _path(section, name), (low, high), "finite bounds")


def nearest_name_hint(name: str, known: Iterable[str], *, min_similarity: float = 0.0) -> str:
    """Returns "; the nearest is 'NAME'" for the most similar known name, or "" if there is none.

    Args:
        name: The name that was given.
        known: The names that exist.
        min_similarity: Names that are less similar, from 0 (nothing in common) to 1 (equal), are not suggested.
    """
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=min_similarity)
    return f"; the nearest is {nearest[0]!r}" if nearest else ""


def _path(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name
