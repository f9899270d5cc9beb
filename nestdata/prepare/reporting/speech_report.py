"""The part of a corpus report about speech: share, level and signal-to-noise ratio of the cuts, in hours."""

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from nestdata.prepare.speech.measures import LEVEL_FIELD, SHARE_FIELD, SNR_FIELD


@dataclass(frozen=True, slots=True)
class SpeechChart:
    """Hours of audio by one measure, in bins of equal width."""

    title: str
    bars: list[tuple[str, float, float]]
    """Name, hours, and hours divided by those of the longest bar; empty bins in between are included."""

    unknown_hours: float
    """Hours of cuts for which it is unknown."""


@dataclass(frozen=True, slots=True)
class _Measure:
    field: str
    title: str
    unit: str
    width: float
    """Width of a bin."""


_MEASURES = (
    _Measure(SHARE_FIELD, "share of speech", "", 0.05),
    _Measure(LEVEL_FIELD, "level of speech", " dBFS", 2.0),
    _Measure(SNR_FIELD, "signal-to-noise ratio", " dB", 3.0),
)


def speech_charts(directory: Path, meta: dict[str, Any]) -> list[SpeechChart]:
    """Returns the charts of a corpus; none if speech was not looked for.

    Args:
        directory: The directory, which holds `cuts.jsonl`.
        meta: The content of `meta.json`.
    """
    if "speech" not in meta:
        return []
    hours = {measure: defaultdict[int | None, float](float) for measure in _MEASURES}
    with (directory / "cuts.jsonl").open("rb") as file:
        for line in file:
            cut = orjson.loads(line)
            custom = cut.get("custom") or {}
            for measure, hours_of in hours.items():
                hours_of[_bin_of(custom.get(measure.field), measure)] += cut["duration"] / 3600
    return [_chart(measure, hours_of) for measure, hours_of in hours.items()]


def _bin_of(value: float | None, measure: _Measure) -> int | None:
    if value is None:
        return None
    if measure.field == SHARE_FIELD and value == 1:  # the last bin includes its upper bound
        return round(1 / measure.width) - 1
    return math.floor(round(value / measure.width, 6))


def _chart(measure: _Measure, hours: dict[int | None, float]) -> SpeechChart:
    unknown = hours.get(None, 0.0)
    numbers = [number for number in hours if number is not None]
    highest = max((hours[number] for number in numbers), default=0.0) or 1.0
    bars = []
    for number in range(min(numbers), max(numbers) + 1) if numbers else ():
        low, high = number * measure.width, (number + 1) * measure.width
        value = hours.get(number, 0.0)
        bars.append((f"{low:g} to {high:g}{measure.unit}", value, value / highest))
    return SpeechChart(measure.title, bars, unknown)
