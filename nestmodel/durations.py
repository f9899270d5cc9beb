"""Durations as people write them: 30m, 12h, 11:30:00."""

import re

from nestmodel.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(setting: str, text: str) -> float:
    """Returns a duration in seconds.

    Args:
        setting: Name of the setting, for the message.
        text: A number with a unit (s, m, h or d), hours:minutes:seconds, or days:hours:minutes:seconds.

    Raises:
        ConfigError: The text is no duration, or is none of more than 0 s.
    """
    seconds = 0.0
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text):
        seconds = float(found[1]) * _SECONDS[found[2]]
    elif re.fullmatch(r"(\d+:)?\d+:\d\d:\d\d", text):
        units = (86400, 3600, 60, 1)
        parts = text.split(":")
        seconds += sum(unit * int(part) for unit, part in zip(units[-len(parts) :], parts, strict=True))
    if not seconds:
        raise ConfigError(f"{setting} is {text!r}: give it with its unit, such as 30m, 12h or 1d, or as 11:30:00.")
    return seconds
