"""The setting `columns` of `prepare_corpus`: which columns of a table, or keys of a line, have the roles of a row.

The module imports no heavy package, so that `nestdata prepare --help` starts fast.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from nestdata.errors import ConfigError

ROLES = ("audio", "start", "end", "duration", "channel", "text", "language", "speaker")
"""What a column may be: the audio file, its span, its channel, and labels."""

TIMES = ("start", "end", "duration")
"""The roles that are times of the file."""

UNITS = {
    "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3, "samples": None,
}  # fmt: skip
"""Units of times, as parts of a second; None for samples of the file."""

_BETWEEN_WORDS = " .-/()[]"
_WORD_BOUNDARY = re.compile(rf"(?<=[a-z0-9])(?=[A-Z])|[{re.escape(_BETWEEN_WORDS)}]+")


class Column(NamedTuple):
    """A column or key that the caller names."""

    role: str
    name: str
    """Empty if no column has the role."""

    unit: float | None
    """Unit of a time, as a part of a second; None for samples of the file."""


def key_of(name: str) -> str:
    """Returns a name in the form in which names are compared: lower case, with underscores between words.

    `Start Time (s)` becomes `start_time_s`.
    """
    return _WORD_BOUNDARY.sub("_", name.rstrip(_BETWEEN_WORDS)).lower()


def stem_and_unit(key: str) -> tuple[str, float | None]:
    """Splits a name, in the form of `key_of`, into the name without a unit and the unit; seconds if it has none."""
    stem, _, unit = key.rpartition("_")
    return (stem, UNITS[unit]) if stem and unit in UNITS else (key, 1.0)


def given_name(role: str, columns: tuple[Column, ...]) -> str | None:
    """Returns the name that the caller gives for a role; None if the caller gives none."""
    return next((column.name for column in columns if column.role == role), None)


@lru_cache(maxsize=16)
def parse_columns(text: str) -> tuple[Column, ...]:
    """Returns the columns in a text such as `audio=path,start=begin:ms`; none for an empty text.

    Raises:
        ConfigError: The text names another role or a role twice, leaves out a name that is needed, or has times that
            cannot give one span.
    """
    columns: dict[str, Column] = {}
    for part in text.split(",") if text else ():
        role, equals, name = (each.strip() for each in part.partition("="))
        stem, _, suffix = name.rpartition(":")
        if role in TIMES and stem and suffix in UNITS:
            column = Column(role, stem, UNITS[suffix])
        else:
            column = Column(role, name, stem_and_unit(key_of(name))[1])
        if role not in ROLES or not equals or not (name or role in (*TIMES, "channel")):
            raise ConfigError(
                f"columns ({text[:80]!r}): {part[:80]!r} is not ROLE=NAME with one of the roles {', '.join(ROLES)}, "
                "such as --columns audio=path,start=begin:ms,end=end:ms,text=sentence."
            )
        if role in columns:
            raise ConfigError(f"columns ({text[:80]!r}): names {role} twice. Name one column.")
        columns[role] = column
    times = [column for column in columns.values() if column.role in TIMES and column.name]
    if len({time.unit is None for time in times}) > 1:
        raise ConfigError(f"columns ({text[:80]!r}): one span has seconds and samples. Name times of one unit.")
    return tuple(columns.values())
