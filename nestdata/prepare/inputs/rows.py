"""What the columns of a table and the keys of a JSON line mean: the audio file, its span, its channel, and labels.

One list of names serves all formats, and `--columns` serves all other names. Times are in seconds unless the name ends
with another unit, as `start_ms` does. `offset` is a start, as NeMo has it, or the end beside an `onset`, as in tables
of sound events. A number that looks like a time or a channel, and is not read as one, is an error: taken for a label,
it would make wrong cuts without a word.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from nestdata.audio.channels import NAMED_CHANNELS
from nestdata.columns import TIMES, Column, given_name, key_of, stem_and_unit
from nestdata.errors import ConfigError, ManifestError, shortened
from nestdata.prepare.inputs.audio import Audio
from nestdata.prepare.inputs.entry import AUDIO_KEYS, AUDIO_SUFFIXES, MAX_SECONDS, Entry, is_number, span_suffix
from nestdata.prepare.inputs.labels import LABELS
from nestdata.prepare.inputs.names import FileNames, id_of_name

AUDIO_NAMES = (
    *AUDIO_KEYS, "audio_path", "audio_file", "path", "file_path", "filepath", "file", "file_name", "filename",
    "wav_filename", "wav_path", "wav", "audio", "location",
)  # fmt: skip
"""Names of the audio file, of which the first one that is there is read: those of NeMo, Common Voice, Hugging Face's
`metadata.csv`, DeepSpeech and WeNet, and what people call it."""

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
_MAX_CHANNEL = 65_536.0
# Largest difference, in seconds, between an end and the one that start and duration give.
_ROUNDING_S = 0.02

# Words of names that look like the start or the end of a span, like a channel, and like the number of channels.
_TIME_WORDS = frozenset(
    "start starts begin begins beginning onset offset from xmin tmin t0 end ends stop stops to xmax tmax t1".split()
)
_END_WORDS = frozenset("end ends stop stops to xmax tmax t1".split())
_CHANNEL_WORDS, _COUNT_WORDS = frozenset({"channel", "chan"}), frozenset({"num", "n", "nb", "count", "of"})
_AUDIO_WORDS = frozenset({"audio", "wav", "path", "file", "filepath", "filename"})


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
    """Returns whether a column or key has one of the known names of an audio file, or that which the caller gives."""
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
        ManifestError: None is that of an audio file, or the times do not give a span.
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
        "--columns says which, such as --columns start=NAME:ms,duration=NAME:ms, and --columns end= that there is none."
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


def _check_suspects(row: Mapping[str, Any], meaning: Meaning, where: str) -> None:
    """Raises ManifestError if a value looks like a time, a channel or audio, and is not read as one."""
    for name, role in meaning.suspects:
        value = _given(row[name])
        if role == "audio":
            looks_so = _is_other_audio(value, row[meaning.audio])
        else:
            looks_so = is_number(value, MAX_SECONDS * 1e6) or (role == "channel" and value in NAMED_CHANNELS)
        if looks_so:
            what = {"channel": "a channel", "audio": "an audio file"}.get(role, "a time")
            none = f", or --columns {role}= if it is none of the file" if role != "audio" else ""
            choice = meaning.audio if role == "audio" else name
            raise ManifestError(
                f"{where}: {name} is {shortened(repr(value), 80)}, which looks like {what}, and is not read as one. "
                f"Say what it is, as by --columns {role}={choice}{none}."
            )


def _is_other_audio(value: Any, read: Any) -> bool:
    """Returns whether a value is the name of an audio file, and of another one than that which is read."""
    if not (isinstance(value, str) and isinstance(read, str) and value.lower().endswith(AUDIO_SUFFIXES)):
        return False
    stems = {each.rpartition("/")[2].rpartition(".")[0] or each.rpartition("/")[2] for each in (value, read)}
    return len(stems) > 1


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
    """Returns the entry of the span and the channel that a row names.

    Its id tells both, unless the row holds its audio itself, and is then the only one of it.

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
    if meaning.suspects:
        _check_suspects(row, meaning, where)
    first = count = None
    start, duration = _span(row, meaning.times, where)
    if meaning.times and meaning.times[0].unit is None:
        first, count = (None if value is None else int(value) for value in (start, duration))
        parts = [first, count] if first is not None and meaning.audio else []
        cut_id = ":".join([cut_id, *(str(part) for part in parts if part is not None)])
        start = duration = None
    elif start is not None and meaning.audio:
        cut_id += span_suffix(start, duration)
    entry = Entry(where, cut_id, audio, start or 0.0, duration, count, labels, number, first, meaning=meaning)
    return entry if meaning.channel is None else with_channel(entry, row, meaning.channel)


def with_channel(entry: Entry, row: Mapping[str, Any], name: str) -> Entry:
    """Returns an entry with the channel that a row names, if it does.

    Raises:
        ManifestError: It is not a number that can be one.
    """
    channel = _channel(row, name, entry.where)
    if channel is None:
        return entry
    is_only_row = entry.meaning is not None and not entry.meaning.audio
    return entry._replace(cut_id=entry.cut_id if is_only_row else f"{entry.cut_id}@ch{channel}", channel=channel)


def _span(row: Mapping[str, Any], times: tuple[Time, ...], where: str) -> tuple[float | None, float | None]:
    """Returns start and duration, in seconds or samples.

    A field of a table that leaves the start empty stands for 0 beside a duration.

    Raises:
        ManifestError: A time is not a number that can be one, or times contradict each other.
    """
    values: dict[str, float] = {}
    is_empty = False
    for time in times:
        value = _value(row, time, where)
        is_empty = is_empty or (value is None and time.what == "start" and row.get(time.name) is not None)
        if value is None:
            continue
        if abs(values.setdefault(time.what, value) - value) > (_ROUNDING_S if time.unit is not None else 0):
            names = " and ".join(other.name for other in times if other.what == time.what)
            raise ManifestError(f"{where}: {names} differ. Fix or drop this line, or one of them.")
    start, end, duration = values.get("start"), values.get("end"), values.get("duration")
    if end is not None:
        if start is None and duration is not None:
            start = end - duration
            start = 0.0 if -_ROUNDING_S < start < 0 and times[0].unit is not None else start
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
    if value is None or value != value:  # pandas marks a missing number by NaN
        return None
    most = MAX_SECONDS / (time.unit or 1e-6)
    if not is_number(value, most) or (time.unit is None and value != int(value)):
        unit = "samples" if time.unit is None else "seconds" if time.unit == 1.0 else "milliseconds"
        raise ManifestError(
            f"{where}: {time.name} is {repr(value)[:80]}. Give {unit} as a number from 0 to {most:g}, or say that it "
            f"is no {time.what} by --columns {time.what}=."
        )
    return float(value) if time.unit is None else value * time.unit


def _channel(row: Mapping[str, Any], name: str, where: str) -> int | None:
    value = _given(row[name])
    if value is None or value != value:
        return None
    if isinstance(value, str):
        value = NAMED_CHANNELS.get(value.lower(), value)
    if not is_number(value, _MAX_CHANNEL) or value != int(value):
        raise ManifestError(
            f"{where}: {name} is {repr(value)[:80]}. Give the channel as a number, counted from 0, or say that it is "
            "no channel of the file by --columns channel=."
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
