"""What the columns of a table and the keys of a JSON line mean: the audio file, its span, its channel, and labels.

One list of names serves all formats. Times are in seconds unless the name ends with another unit, as `start_ms` does.
`offset` is a start, as NeMo has it, or the end beside an `onset`, as in tables of sound events.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.audio import Audio
from nestdata.prepare.inputs.entry import AUDIO_KEYS, MAX_SECONDS, Entry, is_number, span_suffix
from nestdata.prepare.inputs.labels import LABELS
from nestdata.prepare.inputs.names import FileNames, id_of_name

AUDIO_NAMES = (
    *AUDIO_KEYS, "audio_path", "audio_file", "path", "file_path", "filepath", "file", "file_name", "filename",
    "wav_filename", "wav", "audio", "location",
)  # fmt: skip
"""Names of the audio file, of which the first one that is there is read: those of NeMo, Common Voice, Hugging Face's
`metadata.csv`, DeepSpeech and WeNet, and what people call it."""

What = Literal["start", "end", "duration"]

_TIMES: Mapping[str, What] = {
    **dict.fromkeys(("offset", "start", "begin", "onset", "start_time", "begin_time", "starttime"), "start"),
    **dict.fromkeys(("segment_start", "segment_start_time", "segment_begin", "segment_begin_time"), "start"),
    **dict.fromkeys(("end", "stop", "end_time", "stop_time", "endtime", "segment_end", "segment_end_time"), "end"),
    **dict.fromkeys(("duration", "dur", "segment_duration"), "duration"),
}
# Units that a name may end with, as parts of a second; None for samples of the file.
_UNITS = {
    "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3, "samples": None,
}  # fmt: skip
_CHANNELS = ("channel", "channel_id", "channel_selector")
_MAX_CHANNEL = 65_536.0
# Largest difference, in seconds, between an end and the one that start and duration give.
_ROUNDING_S = 0.02


class Time(NamedTuple):
    """A column or key with a time."""

    name: str
    what: What
    unit: float | None
    """As a part of a second; None for samples of the file."""


class Meaning(NamedTuple):
    """What the names of a row mean."""

    audio: str
    times: tuple[Time, ...]
    channel: str | None
    labels: tuple[str, ...]
    """All other names."""


def key_of(name: str) -> str:
    """Returns a name as it is compared: in small letters, with underscores."""
    return name.lower().replace(" ", "_")


@lru_cache(maxsize=4096)
def meaning_of(names: tuple[str, ...]) -> Meaning | None:
    """Returns what the names of a row mean; None if none of them is that of an audio file.

    Raises:
        ManifestError: The times do not give a span. The message has no position.
    """
    named: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name != key_of(name)):  # a name in small letters comes first
        named.setdefault(key_of(name), name)
    audio = next((named[key] for key in AUDIO_NAMES if key in named), None)
    if audio is None:
        return None
    times = tuple(time for key, name in named.items() if (time := _time(key, name)))
    if any(key_of(time.name).startswith("onset") for time in times):
        times = tuple(time._replace(what="end") if key_of(time.name).startswith("offset") else time for time in times)
    times = _in_one_unit(times)
    channel = next((named[key] for key in _CHANNELS if key in named), None)
    read = {audio, channel, *(time.name for time in times)}
    return Meaning(audio, times, channel, tuple(name for name in names if name not in read))


def label_name(name: str) -> str:
    """Returns the name of a column as a label: `text` for `Text`, and other names as they are."""
    key = key_of(name)
    return key if key in LABELS else name


def audio_name(row: Mapping[str, Any], meaning: Meaning, where: str) -> str:
    """Returns the name of the audio file in a row.

    Raises:
        ManifestError: It cannot be that of a file.
    """
    name = row[meaning.audio]
    if not name:
        name = next((row[key] for key in AUDIO_KEYS if row.get(key)), name)  # as NeMo does
    if isinstance(name, str) and name.strip() and name[-1] != "/" and "\0" not in name:
        return name
    raise ManifestError(
        f"{where}: {meaning.audio} is {repr(name)[:80]}. Give the path of one file, or drop this line; join the "
        "channels of a list into one file, for instance with `sox -M`."
    )


def _time(key: str, name: str) -> Time | None:
    if key in _TIMES:
        return Time(name, _TIMES[key], 1.0)
    stem, _, unit = key.rpartition("_")
    return Time(name, _TIMES[stem], _UNITS[unit]) if stem in _TIMES and unit in _UNITS else None


def _in_one_unit(times: tuple[Time, ...]) -> tuple[Time, ...]:
    """Returns the times without those in samples whose meaning others give in seconds.

    Raises:
        ManifestError: There is an end alone, or seconds and samples are needed for one span.
    """
    in_seconds = {time.what for time in times if time.unit is not None}
    times = tuple(time for time in times if time.unit is not None or time.what not in in_seconds)
    if {time.what for time in times} != {"end"} and len({time.unit is None for time in times}) < 2:
        return times
    found = ", ".join(time.name for time in times)
    raise ManifestError(
        f"{found} do not give a start and an end in one unit. Give a start with a duration or an end, or a duration."
    )


def entry_of_row(
    where: str,
    name: str,
    row: Mapping[str, Any],
    meaning: Meaning,
    names: FileNames,
    root: str,
    *,
    labels: dict[str, Any],
    number: int | None = None,
) -> Entry:
    """Returns the entry of a row that names a file.

    Args:
        where: Position in the input.
        name: The name of the file; see `audio_name`.
        row: Values by name.
        meaning: What the names mean.
        names: Finds the file.
        root: The folder that ids are relative to.
        labels: See `Entry`.
        number: See `Entry`.

    Raises:
        ManifestError: A time or the channel cannot be one.
    """
    file = names.file(name)
    return placed(where, id_of_name(file.location, name, root), file, row, meaning, labels, number)


def placed(
    where: str,
    cut_id: str,
    audio: Audio,
    row: Mapping[str, Any],
    meaning: Meaning,
    labels: dict[str, Any],
    number: int | None,
) -> Entry:
    """Returns the entry of the span and the channel that a row names; its id tells both.

    Args:
        where: Position in the input.
        cut_id: The id of the whole file.
        audio: The audio of the file.
        row: Values by name.
        meaning: What the names mean.
        labels: See `Entry`.
        number: See `Entry`.

    Raises:
        ManifestError: A time or the channel cannot be one.
    """
    first = count = None
    start, duration = _span(row, meaning.times, where)
    if meaning.times and meaning.times[0].unit is None:
        first, count = (None if value is None else int(value) for value in (start, duration))
        parts = [first, count] if first is not None else []
        cut_id = ":".join([cut_id, *(str(part) for part in parts if part is not None)])
        start = duration = None
    elif start is not None:
        cut_id += span_suffix(start, duration)
    entry = Entry(where, cut_id, audio, start or 0.0, duration, count, labels, number, first)
    return entry if meaning.channel is None else with_channel(entry, row, meaning.channel)


def with_channel(entry: Entry, row: Mapping[str, Any], name: str) -> Entry:
    """Returns an entry with the channel that a row names, if it does.

    Raises:
        ManifestError: It is not a number that can be one.
    """
    channel = _channel(row, name, entry.where)
    return entry if channel is None else entry._replace(cut_id=f"{entry.cut_id}@ch{channel}", channel=channel)


def _span(row: Mapping[str, Any], times: tuple[Time, ...], where: str) -> tuple[float | None, float | None]:
    """Returns start and duration, in seconds or samples.

    A field of a table that leaves the start empty stands for 0 beside a duration.

    Raises:
        ManifestError: A time is not a number that can be one, or times contradict each other.
    """
    values: dict[What, float] = {}
    is_empty = False
    for time in times:
        value = _value(row, time, where)
        is_empty = is_empty or (value is None and time.what == "start" and row[time.name] is not None)
        if value is None:
            continue
        if abs(values.setdefault(time.what, value) - value) > (_ROUNDING_S if time.unit is not None else 0):
            names = " and ".join(other.name for other in times if other.what == time.what)
            raise ManifestError(f"{where}: {names} differ. Fix or drop this line, or one of them.")
    start, end, duration = values.get("start"), values.get("end"), values.get("duration")
    if end is not None:
        start = end - duration if start is None and duration is not None else start
        length = end - (start or 0)
        if length <= 0 or (start or 0) < 0:
            raise ManifestError(f"{where}: the end, {end:g}, is not after the start. Fix or drop this line.")
        if duration is not None and abs(length - duration) > _ROUNDING_S:
            raise ManifestError(
                f"{where}: from start to end are {length:g}, but the duration is {duration:g}. Fix or drop this line, "
                "or one of these columns."
            )
        duration = length if duration is None else duration
    if start is None and duration is not None and is_empty:
        start = 0.0
    return start, duration


def _value(row: Mapping[str, Any], time: Time, where: str) -> float | None:
    """Returns a time in seconds, or in samples; None if the row has none."""
    value = _given(row[time.name])
    if value is None:
        return None
    most = MAX_SECONDS / (time.unit or 1e-6)
    if not is_number(value, most) or (time.unit is None and value != int(value)):
        unit = "samples" if time.unit is None else "seconds" if time.unit == 1.0 else "milliseconds"
        raise ManifestError(
            f"{where}: {time.name} is {repr(value)[:80]}. Give {unit} as a number from 0 to {most:g}, or give the "
            "column another name if it is no time."
        )
    return float(value) if time.unit is None else value * time.unit


def _channel(row: Mapping[str, Any], name: str, where: str) -> int | None:
    value = _given(row[name])
    if value is None or value != value:  # pandas marks a missing number by NaN
        return None
    if not is_number(value, _MAX_CHANNEL) or value != int(value):
        raise ManifestError(
            f"{where}: {name} is {repr(value)[:80]}. Give the channel as a number, counted from 0, or give the column "
            "another name if it is no channel of the file."
        )
    return int(value)


def _given(value: Any) -> Any:
    """Returns the number that a field of a table is, None for an empty field, and any other value as it is."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    try:
        return float(text) if text else None
    except ValueError:
        return text
