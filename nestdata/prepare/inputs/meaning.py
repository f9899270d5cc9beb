"""What the columns of a table and the keys of a JSON line mean: the audio file, its span, its channel, and labels.

One list of names serves all formats, and `--columns` serves all other names. Times are in seconds unless the name ends
with another unit, as `start_ms` does. `offset` is a start, as NeMo has it, or the end beside an `onset`, as in tables
of sound events. `rows` reads the values of a row.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from nestdata.columns import TIMES, Column, given_name, key_of, stem_and_unit
from nestdata.errors import ConfigError, ManifestError
from nestdata.prepare.inputs.entry import AUDIO_KEYS

AUDIO_NAMES = (
    *AUDIO_KEYS, "audio_path", "audio_file", "path", "file_path", "filepath", "file", "file_name", "filename",
    "wav_filename", "wav_path", "wav", "audio", "location",
)  # fmt: skip
"""Names of the audio file; the first one that is present is read. They are used by NeMo, Common Voice,
Hugging Face's `metadata.csv`, DeepSpeech and WeNet, or are common in tables."""

_STARTS = (
    "offset", "start", "begin", "onset", "start_time", "begin_time", "starttime", "segment_start", "segment_start_time",
    "segment_begin", "segment_begin_time",
)  # fmt: skip
_ENDS = ("end", "stop", "end_time", "stop_time", "endtime", "segment_end", "segment_end_time")
_TIMES: Mapping[str, str] = {
    **dict.fromkeys(_STARTS, "start"),
    **dict.fromkeys(_ENDS, "end"),
    **dict.fromkeys(("duration", "dur", "segment_duration"), "duration"),
}
_CHANNELS = ("channel", "channel_id", "channel_selector")

# Words of names that look like the start or the end of a span, like a channel, and like the number of channels.
_TIME_WORDS = frozenset(
    "start starts begin begins beginning onset offset from xmin tmin t0 end ends stop stops to xmax tmax t1".split()
)
_END_WORDS = frozenset("end ends stop stops to xmax tmax t1".split())
_CHANNEL_WORDS, _COUNT_WORDS = frozenset({"channel", "chan"}), frozenset({"num", "n", "nb", "count", "of"})
_AUDIO_WORDS = frozenset({"audio", "wav", "path", "file", "filepath", "filename"})

LABELS = {
    "text": "text",
    "sentence": "text",
    "transcription": "text",
    "transcript": "text",
    "raw_text": "text",
    "normalized_text": "text",
    "txt": "text",
    "lang": "language",
    "language": "language",
    "locale": "language",
    "speaker": "speaker",
    "speaker_id": "speaker",
    "client_id": "speaker",
}
"""Label names in the inputs, and the supervision fields that they become."""

# Labels of a text that are used only if there is no other, because data sets have them beside it.
_SECOND_TEXTS = ("raw_text", "normalized_text", "txt")
# Whole numbers above this are not exact as floats.
_MAX_WHOLE = 1 << 53
# How pandas and Python write a missing value into a table, and a whole number of a column with missing values.
_NOT_A_NUMBER = frozenset({"nan", "NaN"})
_WHOLE_FLOAT = re.compile(r"-?\d+\.0")
# The language code of Min Nan Chinese (ISO 639-3).
_MIN_NAN = "nan"


class Time(NamedTuple):
    """A column or key with a time."""

    name: str
    what: str
    """One of `TIMES`."""

    unit: float | None
    """As a part of a second; None for samples of the file."""


class Meaning(NamedTuple):
    """What the names of a row mean."""

    audio: str
    """Empty if the row holds its audio itself."""

    times: tuple[Time, ...]
    channel: str | None
    labels: tuple[tuple[str, str], ...]
    """All other names, and the labels that they are."""

    suspects: tuple[tuple[str, str], ...]
    """Names among the labels that look like a `start`, an `end`, a `channel` or `audio`, with the role."""

    unread: tuple[str, ...] = ()
    """Names whose values are not used."""

    def labels_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the labels of a row."""
        return {label: row[name] for name, label in self.labels}

    def read_as(self) -> dict[str, list[str]]:
        """Returns the names by what they are read as: the roles, `labels` and `unread`."""
        found: dict[str, list[str]] = {"audio": [self.audio]} if self.audio else {}
        for time in self.times:
            unit = "samples" if time.unit is None else "s" if time.unit == 1.0 else "ms"
            found.setdefault(time.what, []).append(f"{time.name} in {unit}")
        if self.channel is not None:
            found["channel"] = [self.channel]
        for name, label in self.labels:
            found.setdefault(LABELS.get(label, "labels"), []).append(name)
        return found | ({"unread": [*self.unread]} if self.unread else {})


def names_audio(names: Iterable[str], columns: tuple[Column, ...], known: Collection[str] = AUDIO_NAMES) -> bool:
    """Returns whether a column or key has a known name of an audio file, or the name that the caller gives."""
    given = given_name("audio", columns)
    return any(name == given or key_of(name) in known for name in names)


def meaning_in(names: Iterable[str], where: str, columns: tuple[Column, ...], *, is_embedded: bool = False) -> Meaning:
    """Returns what the names of a row mean.

    Args:
        names: The names.
        where: Position of the row in the input, for messages.
        columns: What the caller says of them.
        is_embedded: Whether the row holds its audio itself. A duration alone is then a label.

    Raises:
        ManifestError: None of them names an audio file, or the times do not give a span.
    """
    names = tuple(names)
    try:
        meaning = _meaning_of(names, columns, is_embedded)
    except ManifestError as error:
        raise ManifestError(f"{where}: {error}") from None
    if meaning is None:
        given = given_name("audio", columns) or AUDIO_KEYS[0]
        found = ", ".join(name[:40] for name in names[:8])
        raise ManifestError(
            f"{where}: no {given} among {found}. Add it, or say which of them names the audio file: "
            "--columns audio=NAME."
        )
    return meaning


@lru_cache(maxsize=4096)
def _meaning_of(names: tuple[str, ...], columns: tuple[Column, ...], is_embedded: bool) -> Meaning | None:
    """Returns what `meaning_in` does, but None without audio; its errors have no position."""
    given = {column.role: column for column in columns}
    taken = {column.name for column in columns}
    named: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name != key_of(name)):  # a name in small letters comes first
        if name not in taken:
            named.setdefault(key_of(name), name)
    audio = "" if is_embedded else next((named[key] for key in AUDIO_NAMES if key in named), None)
    if "audio" in given and not is_embedded:
        audio = given["audio"].name if given["audio"].name in names else None
    if audio is None:
        return None
    if given.keys().isdisjoint(TIMES):
        times = _times_by_name(named)
    else:
        times = tuple(Time(given[what].name, what, given[what].unit) for what in TIMES if what in given)
        times = tuple(time for time in times if time.name in names)
    if is_embedded and {time.what for time in times} == {"duration"}:
        times = ()
    _check_span(times)
    channel = next((named[key] for key in _CHANNELS if key in named), None)
    if "channel" in given:
        channel = given["channel"].name if given["channel"].name in names else None
    read = {audio, channel, *(time.name for time in times)}
    labels = _labels(tuple(name for name in names if name not in read), given)
    looks_like: dict[str, str] = {}
    if audio and audio not in AUDIO_KEYS and "audio" not in given:
        looks_like |= {name: "audio" for name, _ in labels if _AUDIO_WORDS & _words(name)}
    if channel is None and "channel" not in given:
        looks_like |= {name: "channel" for name, _ in labels if _CHANNEL_WORDS & _words(name)}
        looks_like = {name: role for name, role in looks_like.items() if not _COUNT_WORDS & _words(name)}
    read_times = {time.what for time in times}
    if given.keys().isdisjoint(TIMES) and not ("end" in read_times or {"start", "duration"} <= read_times):
        times_like = [name for name, _ in labels if _TIME_WORDS & _words(name)]
        looks_like |= {name: "end" if _END_WORDS & _words(name) else "start" for name in times_like}
    unread = tuple(name for name in names if name not in read and name not in dict(labels))
    return Meaning(audio, times, channel, labels, tuple(looks_like.items()), unread)


def check_columns(names: Iterable[str], columns: tuple[Column, ...], where: str) -> None:
    """Raises ConfigError if the first row lacks a column that the caller names."""
    names = tuple(names)
    missing = next((column for column in columns if column.name and column.name not in names), None)
    if missing:
        found = ", ".join(name[:40] for name in names[:20])
        raise ConfigError(
            f"{where}: no {missing.name[:80]!r}, which --columns names as {missing.role}. There are: {found}."
        )


def _times_by_name(named: Mapping[str, str]) -> tuple[Time, ...]:
    """Returns the times among names, given by the form in which they are compared."""
    times = tuple(time for key, name in named.items() if (time := _time(key, name)))
    if any(key_of(time.name).startswith("onset") for time in times):
        times = tuple(time._replace(what="end") if key_of(time.name).startswith("offset") else time for time in times)
    # Times in samples give way to those in seconds.
    in_seconds = {time.what for time in times if time.unit is not None}
    return tuple(time for time in times if time.unit is not None or time.what not in in_seconds)


def _time(key: str, name: str) -> Time | None:
    stem, unit = stem_and_unit(key)
    return Time(name, _TIMES[stem], unit) if stem in _TIMES else None


def _check_span(times: tuple[Time, ...]) -> None:
    """Raises ManifestError if there is an end alone, or if seconds and samples are needed for one span."""
    if {time.what for time in times} != {"end"} and len({time.unit is None for time in times}) < 2:
        return
    found = ", ".join(time.name for time in times)
    raise ManifestError(
        f"{found} do not give a start and an end in one unit. Give a start with a duration or an end, or a duration; "
        "say which by --columns, such as --columns start=NAME:ms,duration=NAME:ms, or --columns end= if none is an end."
    )


def _labels(names: tuple[str, ...], given: Mapping[str, Column]) -> tuple[tuple[str, str], ...]:
    """Returns the labels that names are: `text` for `Text`, and other names as they are.

    A label that the caller names is the only one for its field.
    """
    fields = {column.name: role for role, column in given.items() if role in LABELS and column.name in names}
    labels: dict[str, str] = {}
    for name in names:
        key = key_of(name)
        label = fields.get(name) or (key if key in LABELS and key not in {*names, *labels.values()} else name)
        if name and (name in fields or LABELS.get(label) not in fields.values()):
            labels[name] = label
    return tuple(labels.items())


def _words(name: str) -> set[str]:
    return set(key_of(name).split("_"))


def label_text(value: Any) -> str | None:
    """Returns a label as text; None if it is missing. pandas marks missing values of any type by NaN.

    A float that is a whole number is written without `.0`: pandas stores a column of integers with gaps as floats.
    """
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        if value.is_integer() and abs(value) < _MAX_WHOLE:
            return str(int(value))
    return str(value)


def divide_labels(labels: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the supervision fields among the labels of an entry, and its custom fields.

    Of several labels for one field, the one with the name of the field is taken, or else the last one; the others are
    custom fields. Missing values of supervision fields are left out.
    """
    texts = {key: text for key, value in labels.items() if key in LABELS and (text := label_text(value)) is not None}
    key_of = {LABELS[key]: key for key in sorted(texts, key=lambda key: key not in _SECOND_TEXTS)}
    key_of |= {field: field for field in key_of if field in texts}
    others = texts.keys() - key_of.values()
    custom = {key: value for key, value in labels.items() if key not in LABELS or key in others}
    return {field: texts[key] for field, key in key_of.items()}, custom


def table_labels(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the labels among the fields of a table, which are all text: without empty ones and `nan`.

    Numbers of speakers lose `.0`, as by `label_text`. A text that is a number is kept as it is written, and so is the
    language `nan`, which is Min Nan.
    """
    labels = {}
    for name, value in fields.items():
        kind = LABELS.get(name)
        if not value or (value in _NOT_A_NUMBER and not (kind == "language" and value == _MIN_NAN)):
            continue
        labels[name] = value[:-2] if kind == "speaker" and _WHOLE_FLOAT.fullmatch(value) else value
    return labels
