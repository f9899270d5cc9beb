"""Reads a row of any format: what its names mean, the file, the span and the channel that it gives, and its labels.

One list of names serves the columns of tables and the keys of JSON lines, and `--columns` serves all other names. Times
are in seconds unless the name ends with another unit, as `start_ms` does. `offset` is a start, as NeMo has it, or the
end beside an `onset`, as in tables of sound events. A value that looks like a time or a channel, and is not read as
one, is an error: if it were taken for a label, cuts could be wrong without a warning.

Source for file names: NVIDIA NeMo 3.0, `get_full_path`: a relative name is looked up in the folder of the manifest,
then in the current directory and with `~` expanded. Differs: NeMo skips the first place for names of 255 characters and
more.
"""

import math
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import quote

from nestdata.audio.channels import NAMED_CHANNELS
from nestdata.columns import ROLES, TIMES, Column, given_name, key_of, stem_and_unit
from nestdata.errors import ConfigError, ManifestError, shortened
from nestdata.prepare.inputs.entry import AUDIO_KEYS, AUDIO_SUFFIXES, MAX_SECONDS, Audio, Entry, File, span_suffix
from nestdata.storage import has_scheme, is_url

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

# Words of names that look like the start, the end or the length of a span, like a channel, and like the number of
# channels.
_START_WORDS = frozenset("start starts begin begins beginning onset offset from xmin tmin t0".split())
_END_WORDS = frozenset("end ends stop stops to xmax tmax t1".split())
_DURATION_WORDS = frozenset("duration dur length len frames samples".split())
_CHANNEL_WORDS, _COUNT_WORDS = frozenset({"channel", "chan", "ch"}), frozenset({"num", "n", "nb", "count", "of"})
_AUDIO_WORDS = frozenset({"audio", "wav", "path", "file", "filepath", "filename"})

# Labels of a text that are used only if there is no other, because data sets have them beside it.
_SECOND_TEXTS = ("raw_text", "normalized_text", "txt")
LABELS: Mapping[str, str] = {
    **dict.fromkeys(("text", "sentence", "transcription", "transcript", *_SECOND_TEXTS), "text"),
    **dict.fromkeys(("lang", "language", "locale"), "language"),
    **dict.fromkeys(("speaker", "speaker_id", "client_id"), "speaker"),
}
"""Label names in the inputs, and the supervision fields that they become."""

# Whole numbers above this are not exact as floats.
_MAX_WHOLE = 1 << 53
_MAX_CHANNEL = 65_536.0
# Largest difference, in seconds, between an end and the one that start and duration give.
_ROUNDING_S = 0.02
# Times in text, such as 0:01:30.5, 1,5 and 2.5s.
_CLOCK = re.compile(r"\d+(?:[:.,]\d+)*s?")
# Number of names, and of relative ones among them, that are looked up to find the folder that ids are relative to.
_MAX_NAMES, _MAX_LOOKUPS = 10_000, 100


class Meaning(NamedTuple):
    """What the names of a row mean."""

    audio: str
    """Empty if the row holds its audio itself."""

    times: tuple[Column, ...]
    channel: str | None
    labels: tuple[tuple[str, str], ...]
    """All other names, and the labels that they are."""

    suspects: tuple[tuple[str, str], ...]
    """Names among the labels that look like one of `TIMES`, a `channel` or `audio`, with the role."""

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
            found.setdefault(time.role, []).append(f"{time.name} in {unit}")
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

    def chosen(role: str, known: Iterable[str]) -> str | None:
        if role in given:
            return given[role].name if given[role].name in names else None
        return next((named[key] for key in known if key in named), None)

    audio = "" if is_embedded else chosen("audio", AUDIO_NAMES)
    if audio is None:
        return None
    if given.keys().isdisjoint(TIMES):
        times = _times_by_name(named)
    else:
        times = tuple(given[role] for role in TIMES if role in given and given[role].name in names)
    if is_embedded and {time.role for time in times} == {"duration"}:
        times = ()
    _check_span(times)
    channel = chosen("channel", _CHANNELS)
    read = {audio, channel, *(time.name for time in times)}
    labels = _labels(tuple(name for name in names if name not in read), given)
    read_times = {time.role for time in times}
    is_audio_sure = not audio or audio in AUDIO_KEYS
    is_span_sure = "end" in read_times or {"start", "duration"} <= read_times
    # In tables of sound events, an offset is the end beside an onset.
    ends = _END_WORDS | {"offset"} if any("onset" in key.split("_") for key in map(key_of, names)) else _END_WORDS
    suspects: dict[str, str] = {}
    for name, _ in labels:
        words = set(key_of(name).split("_"))
        if not is_audio_sure and _AUDIO_WORDS & words and not _COUNT_WORDS & words:
            suspects[name] = "audio"
        if channel is None and _CHANNEL_WORDS & words and not _COUNT_WORDS & words:
            suspects[name] = "channel"
        if not is_span_sure and (_START_WORDS | _END_WORDS) & words:
            suspects[name] = "end" if ends & words else "start"
        if not is_span_sure and "start" in read_times and _DURATION_WORDS & words:
            suspects[name] = "duration"
    suspects = {name: role for name, role in suspects.items() if role not in given}
    unread = tuple(name for name in names if name not in read and name not in dict(labels))
    return Meaning(audio, times, channel, labels, tuple(suspects.items()), unread)


def check_columns(names: Iterable[str], columns: tuple[Column, ...], where: str) -> None:
    """Raises ConfigError if the first row lacks a column that the caller names."""
    names = tuple(names)
    missing = next((column for column in columns if column.name and column.name not in names), None)
    if missing:
        found = ", ".join(name[:40] for name in names[:20])
        raise ConfigError(
            f"{where}: no {missing.name[:80]!r}, which --columns names as {missing.role}. There are: {found}."
        )


def _times_by_name(named: Mapping[str, str]) -> tuple[Column, ...]:
    """Returns the times among names, given by the form in which they are compared."""
    parts = ((name, *stem_and_unit(key)) for key, name in named.items())
    times = tuple(Column(_TIMES[stem], name, unit) for name, stem, unit in parts if stem in _TIMES)
    if any(key_of(time.name).startswith("onset") for time in times):
        times = tuple(time._replace(role="end") if key_of(time.name).startswith("offset") else time for time in times)
    # Times in samples give way to those in seconds.
    in_seconds = {time.role for time in times if time.unit is not None}
    return tuple(time for time in times if time.unit is not None or time.role not in in_seconds)


def _check_span(times: tuple[Column, ...]) -> None:
    """Raises ManifestError if there is an end alone, or if seconds and samples are needed for one span."""
    if {time.role for time in times} != {"end"} and len({time.unit is None for time in times}) < 2:
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


@dataclass(frozen=True, slots=True)
class FileNames:
    """Finds the files that a manifest names.

    All folders are absolute, because workers may run in other folders.
    """

    folders: tuple[str, ...]
    """Absolute paths of the folders that relative names may start from, in order of preference; or one URL."""

    base: str
    """The folder that is assumed for names that exist nowhere, and as the folder of the input in ids."""

    home: str = ""
    """The folder that `~` stands for; empty if it stands for itself, as at URLs."""

    hint: str = ""
    """What to add to the message for a file that does not exist."""

    root: str = ""
    """The folder that ids are relative to."""

    @classmethod
    def of(cls, names: Iterable[str], folders: Sequence[str], default: str) -> "FileNames":
        """Returns the names of a local manifest.

        Args:
            names: Its names; only the first ones are read.
            folders: The folders that they may start from, in order of preference; the first in which one of the names
                exists becomes `base`.
            default: `base` if no name exists.
        """
        relative = (name for name in islice(names, _MAX_NAMES) if name and not _is_absolute(name) and name[0] != "~")
        lookups = ((folder, name) for name in islice(relative, _MAX_LOOKUPS) for folder in folders)
        base = next((folder for folder, name in lookups if os.path.exists(os.path.join(folder, name))), default)
        return cls(tuple(dict.fromkeys(folders)), base, os.path.expanduser("~"))

    @classmethod
    def beside(cls, folder: str, names: Iterable[str]) -> "FileNames":
        """Returns the names of a manifest in a folder; local ones may start from the current directory instead.

        Args:
            folder: Absolute path or URL.
            names: The names in the manifest; not read for a URL.
        """
        return cls((folder,), folder) if is_url(folder) else cls.of(names, (folder, os.getcwd()), folder)

    def file(self, name: str) -> File:
        """Returns the file with a name: an absolute or relative path, or a URL of any scheme."""
        is_home = name[:1] == "~" and self.home
        if _is_absolute(name) or (len(self.folders) == 1 and not is_home):
            return File(resolve(self.base, name), hint=self.hint)
        for folder in self.folders:
            path = resolve(folder, name)
            if os.path.isfile(path):
                return File(path)
        path = resolve(self.base, name)
        if is_home:
            is_own = name[1:2] in ("", "/")
            path = resolve(self.home, "." + name[1:]) if is_own else os.path.expanduser(name)
            if os.path.isfile(path):
                return File(path)
        others = "".join(f", nor below {folder}" for folder in self.folders if is_home or folder != self.base)
        return File(path, hint=others + self.hint)

    def cut_id(self, file: File, name: str) -> str:
        """Returns the id of the cut of a file that has a name in the manifest; see `cut_id_of`.

        If the name is relative, the id does not depend on the location of the manifest.
        """
        cut_id = cut_id_of(file.location, self.root)
        is_inside = not cut_id.startswith("/") and "://" not in cut_id
        if is_inside or not self.root or name.startswith(("/", "~")) or is_url(name):
            return cut_id
        scheme, _, path = cut_id.rpartition("://")
        root_scheme, _, root = self.root.rpartition("://")
        if scheme != root_scheme or (scheme and path.split("/")[0] != root.split("/")[0]):
            return cut_id
        return os.path.relpath("/" + path.lstrip("/"), "/" + root.lstrip("/"))


def audio_name(row: Mapping[str, Any], meaning: Meaning, where: str) -> str:
    """Returns the name of the audio file in a row.

    Raises:
        ManifestError: It cannot be the name of a file.
    """
    name = row[meaning.audio]
    if not name:
        name = next((row[key] for key in AUDIO_KEYS if row.get(key)), name)  # as NeMo does
    if isinstance(name, dict) and not name.get("bytes"):  # as `datasets` writes audio that it has not decoded
        name = name.get("path")
    if isinstance(name, str) and name.strip() and name[-1] != "/" and "\0" not in name:
        return name
    channels = (
        "; join the channels of a list into one file, for instance with `sox -M`" if isinstance(name, list) else ""
    )
    raise ManifestError(
        f"{where}: {meaning.audio} is {repr(row[meaning.audio])[:80]}. Give the path of one file, or drop this "
        f"line{channels}."
    )


def entry_of_row(
    where: str,
    row: Mapping[str, Any],
    meaning: Meaning,
    names: FileNames,
    labels: dict[str, Any],
    number: int | None = None,
) -> Entry:
    """Returns the entry of a row that names a file; see `placed`.

    Raises:
        ManifestError: The name cannot be one of a file, or a time or the channel cannot be one.
    """
    name = audio_name(row, meaning, where)
    file = names.file(name)
    return placed(where, names.cut_id(file, name), file, row, meaning, labels, number)


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

    Its id contains both, unless the row holds its audio itself: then, no other row has the same audio.

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
    channel = None if meaning.channel is None else _channel(row, meaning.channel, where)
    if channel is not None and meaning.audio:
        cut_id += f"@ch{channel}"
    return Entry(where, cut_id, audio, start or 0.0, duration, count, labels, number, first, channel, meaning)


def is_number(value: Any, limit: float) -> bool:
    """Returns whether a value of an input is a number, not a boolean, from 0 up to a limit, which is not included."""
    return type(value) in (int, float) and 0 <= value < limit


def _span(row: Mapping[str, Any], times: tuple[Column, ...], where: str) -> tuple[float | None, float | None]:
    """Returns start and duration, in seconds or samples.

    An empty start in a table means 0 if there is a duration.

    Raises:
        ManifestError: A time is not a number that can be one, or times contradict each other.
    """
    values: dict[str, float] = {}
    is_empty = False
    for time in times:
        value = _value(row, time, where)
        is_empty = is_empty or (value is None and time.role == "start" and row.get(time.name) is not None)
        if value is None:
            continue
        if abs(values.setdefault(time.role, value) - value) > (_ROUNDING_S if time.unit is not None else 0):
            names = " and ".join(other.name for other in times if other.role == time.role)
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


def _value(row: Mapping[str, Any], time: Column, where: str) -> float | None:
    """Returns a time in seconds, or in samples; None if the row has none."""
    value = _given(row[time.name])
    if value is None:
        return None
    most = MAX_SECONDS / (time.unit or 1e-6)
    if not is_number(value, most) or (time.unit is None and value != int(value)):
        unit = "samples" if time.unit is None else "seconds" if time.unit == 1.0 else "milliseconds"
        raise ManifestError(
            f"{where}: {time.name} is {repr(value)[:80]}. Give {unit} as a number from 0 to {most:g}, or say that it "
            f"is no {time.role} by --columns {time.role}=."
        )
    return float(value) if time.unit is None else value * time.unit


def _channel(row: Mapping[str, Any], name: str, where: str) -> int | None:
    value = _given(row[name])
    if value is None:
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
    """Returns the number that a field of a table is, and any other value as it is; None if it is missing.

    pandas marks a missing number by NaN.
    """
    if isinstance(value, str):
        text = value.strip()
        try:
            value = float(text) if text else None
        except ValueError:
            return text
    return None if value != value else value


def _check_suspects(row: Mapping[str, Any], meaning: Meaning, where: str) -> None:
    """Raises ManifestError if a value looks like a time, a channel or audio, and is not read as one."""
    found = [(name, role) for name, role in meaning.suspects if _looks_like(role, _given(row[name]), row, meaning)]
    if not found:
        return
    name, role = found[0]
    value = shortened(repr(_given(row[name])), 80)
    roles = {role: meaning.audio if role == "audio" else name for name, role in reversed(found)}
    choice = shlex.quote(",".join(f"{role}={roles[role]}" for role in ROLES if role in roles))
    what = {"channel": "a channel", "audio": "an audio file"}.get(role, "a time")
    none = f", or --columns {role}= if it is something else" if role != "audio" else ""
    raise ManifestError(
        f"{where}: {name} is {value}, which looks like {what}, and is not read as one. "
        f"Say what it is, as by --columns {choice}{none}."
    )


def _looks_like(role: str, value: Any, row: Mapping[str, Any], meaning: Meaning) -> bool:
    """Returns whether a value looks like one for a role."""
    if role == "audio":
        return _is_other_audio(value, row[meaning.audio])
    if isinstance(value, str):
        return value in NAMED_CHANNELS if role == "channel" else _CLOCK.fullmatch(value) is not None
    return is_number(value, MAX_SECONDS * 1e6)


def _is_other_audio(value: Any, read: Any) -> bool:
    """Returns whether a value names an audio file other than the one that is read."""
    if not (isinstance(value, str) and isinstance(read, str) and value.lower().endswith(AUDIO_SUFFIXES)):
        return False
    stems = {each.rpartition("/")[2].rpartition(".")[0] or each.rpartition("/")[2] for each in (value, read)}
    return len(stems) > 1


def _is_absolute(name: str) -> bool:
    return name[:1] == "/" or ("://" in name and has_scheme(name))


def cut_id_of(file: str, root: str) -> str:
    """Returns the path of a file relative to a root folder, without its suffix.

    Such ids do not change when the root is moved. Both locations are absolute and normalised. A file outside of the
    root has its absolute path or URL, without suffix, as its id; so has every file if the root is empty.
    """
    stem, dot, suffix = file.rpartition(".")
    if not dot or "/" in suffix or stem[-1:] in ("", "/", "."):
        stem = os.path.splitext(file)[0]  # a name without suffix, or one that begins with dots
    inside = root if root.endswith("/") else root + "/"
    return stem[len(inside) :] if root and stem.startswith(inside) else stem


def resolve(directory: str, name: str) -> str:
    """Returns the absolute, normalised location of a file name that is relative to an absolute directory.

    Args:
        directory: An absolute path, or a URL.
        name: A relative or absolute path, or a URL of any scheme, which is returned as it is.
    """
    if "://" in name and has_scheme(name):
        return name
    path = name if name.startswith("/") else f"{directory}/{name}"
    if "://" in path and is_url(path):
        return _resolve_url(path)
    # Most names are normalised already, and skipping `normpath` for them saves minutes over millions of lines.
    # `normpath` keeps two slashes at the start of a path.
    return os.path.normpath(path).replace("//", "/") if "/." in path or "//" in path else path


def _resolve_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    key = os.path.normpath("/" + key).lstrip("/") if "/." in rest or "//" in rest else key
    # Names in manifests are plain, and the path of a web address is percent-encoded.
    return f"{scheme}://{bucket}/{quote(key, safe='/%') if scheme.startswith('http') else key}"


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
