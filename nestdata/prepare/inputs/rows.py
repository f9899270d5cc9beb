"""Reads a row of any format: the file that it names, the id of its cut, its span and its channel.

A number that looks like a time or a channel, and is not read as one, is an error: if it were taken for a label, cuts
could be wrong without a warning.

Source for file names: NVIDIA NeMo 3.0, `get_full_path`: a relative name is looked up in the folder of the manifest,
then in the current directory and with `~` expanded. Differs: NeMo skips the first place for names of 255 characters and
more.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import quote

from nestdata.audio.channels import NAMED_CHANNELS
from nestdata.columns import Column
from nestdata.errors import ManifestError, shortened
from nestdata.prepare.inputs.audio import Audio, File
from nestdata.prepare.inputs.entry import AUDIO_KEYS, AUDIO_SUFFIXES, MAX_SECONDS, Entry, span_suffix
from nestdata.prepare.inputs.meaning import Meaning, Time, meaning_in
from nestdata.storage import has_scheme, is_url

_MAX_CHANNEL = 65_536.0
# Largest difference, in seconds, between an end and the one that start and duration give.
_ROUNDING_S = 0.02
# Number of names, and of relative ones among them, that are looked up to find the folder that ids are relative to.
_MAX_NAMES, _MAX_LOOKUPS = 10_000, 100


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
    def beside(cls, folder: str, names: Callable[[], Iterable[str]]) -> "FileNames":
        """Returns the names of a manifest in a folder; local ones may start from the current directory instead.

        Args:
            folder: Absolute path or URL.
            names: Returns the names in the manifest; not called for a URL.
        """
        return cls((folder,), folder) if is_url(folder) else cls.of(names(), (folder, os.getcwd()), folder)

    def file(self, name: str) -> File:
        """Returns the file with a name: an absolute or relative path, or a URL of any scheme."""
        is_home = name[:1] == "~" and self.home
        if _is_absolute(name) or (len(self.folders) == 1 and not is_home):
            return File(resolve(self.base, name), hint=self.hint)
        for folder in self.folders:
            path = resolve(folder, name)
            if os.path.isfile(path):
                return File(path)
        path = self._from_home(name) if is_home else resolve(self.base, name)
        if is_home and os.path.isfile(path):
            return File(path)
        others = "".join(f", nor below {folder}" for folder in self.folders if is_home or folder != self.base)
        return File(path, hint=others + self.hint)

    def _from_home(self, name: str) -> str:
        """Returns the path that a name with `~` stands for."""
        return resolve(self.home, "." + name[1:]) if name[1:2] in ("", "/") else os.path.expanduser(name)


def audio_name(row: Mapping[str, Any], meaning: Meaning, where: str) -> str:
    """Returns the name of the audio file in a row.

    Raises:
        ManifestError: It cannot be the name of a file.
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


def entry_in(row: Mapping[str, Any], where: str, columns: tuple[Column, ...], names: FileNames, root: str) -> Entry:
    """Returns the entry of a row that names a file; all values that are not read otherwise become labels.

    Args:
        row: Values by name.
        where: Position in the input.
        columns: What the caller says of the names.
        names: Finds the file.
        root: The folder that ids are relative to.

    Raises:
        ManifestError: No name or value is an audio file, or a time or the channel cannot be one.
    """
    meaning = meaning_in(row, where, columns)
    name = audio_name(row, meaning, where)
    file = names.file(name)
    return placed(where, id_of_name(file.location, name, root), file, row, meaning, meaning.labels_of(row), None)


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


def is_number(value: Any, limit: float) -> bool:
    """Returns whether a value of an input is a number, not a boolean, from 0 up to a limit, which is not included."""
    return type(value) in (int, float) and 0 <= value < limit


def _span(row: Mapping[str, Any], times: tuple[Time, ...], where: str) -> tuple[float | None, float | None]:
    """Returns start and duration, in seconds or samples.

    An empty start in a table means 0 if there is a duration.

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
            none = f", or --columns {role}= if it is something else" if role != "audio" else ""
            choice = meaning.audio if role == "audio" else name
            raise ManifestError(
                f"{where}: {name} is {shortened(repr(value), 80)}, which looks like {what}, and is not read as one. "
                f"Say what it is, as by --columns {role}={choice}{none}."
            )


def _is_other_audio(value: Any, read: Any) -> bool:
    """Returns whether a value names an audio file other than the one that is read."""
    if not (isinstance(value, str) and isinstance(read, str) and value.lower().endswith(AUDIO_SUFFIXES)):
        return False
    stems = {each.rpartition("/")[2].rpartition(".")[0] or each.rpartition("/")[2] for each in (value, read)}
    return len(stems) > 1


def id_of_name(path: str, name: str, root: str) -> str:
    """Returns the id of the cut of a file in a manifest; see `cut_id_of`.

    Args:
        path: The absolute path or URL of the file.
        name: The name in the manifest. If it is relative, the id does not depend on the location of the manifest.
        root: The folder that ids are relative to.
    """
    cut_id = cut_id_of(path, root)
    is_outside = cut_id.startswith("/") or "://" in cut_id
    return relative_id(cut_id, root) if is_outside and not (name.startswith(("/", "~")) or is_url(name)) else cut_id


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


def relative_id(cut_id: str, root: str) -> str:
    """Returns an id that is an absolute path or URL as a path relative to the root, if both are in one place."""
    scheme, _, path = cut_id.rpartition("://")
    root_scheme, _, root_path = root.rpartition("://")
    if not root or scheme != root_scheme or (scheme and path.split("/")[0] != root_path.split("/")[0]):
        return cut_id
    return os.path.relpath("/" + path.lstrip("/"), "/" + root_path.lstrip("/"))


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
