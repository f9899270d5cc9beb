"""Entries and sources: the form that every input format is converted to.

An entry is a span of audio that an input names, before the audio has been opened. A source yields the entries of one
input in two steps, so that the work can be shared among processes: `items` runs in one process and only splits the
input into lines, paths, row numbers or shards; `entries` parses one item, in whichever process receives it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import quote

from nestdata.errors import ManifestError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.audio import Audio
from nestdata.storage import has_scheme, is_url

if TYPE_CHECKING:
    from nestdata.prepare.inputs.meaning import Meaning

# Offsets and durations of this many seconds, about four months, or more are treated as mistakes.
MAX_SECONDS = 1e7

MAIN_SUFFIXES = (
    ".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".m4a", ".sph", ".w64", ".wma",
)  # fmt: skip
"""Suffixes of the formats that speech is published in. If files differ in the suffix alone, these are read first."""

# Other suffixes of what the decoders read. Left out are those that mostly name something else, `.mat`, `.htk`
# (features), `.iff` (pictures) and `.ts` (programs), and `.raw`, whose rate is unknown.
_LIBSNDFILE_SUFFIXES = (
    ".wave", ".rf64", ".aifc", ".au", ".snd", ".caf", ".oga", ".mp1", ".mp2", ".nist", ".voc", ".ircam", ".sf",
    ".svx", ".8svx", ".avr", ".paf", ".pvf", ".sds", ".wve", ".xi",
)  # fmt: skip
_FFMPEG_SUFFIXES = (
    ".aac", ".ac3", ".amr", ".ape", ".awb", ".dff", ".dsf", ".dts", ".eac3", ".m4b", ".mka", ".mpc", ".mpga", ".ra",
    ".spx", ".tta", ".weba", ".wv", ".3g2", ".3gp", ".asf", ".avi", ".f4v", ".flv", ".m2ts", ".m4v", ".mkv", ".mov",
    ".mp4", ".mpeg", ".mpg", ".mts", ".mxf", ".ogv", ".ogx", ".vob", ".webm", ".wmv",
)  # fmt: skip

AUDIO_SUFFIXES = MAIN_SUFFIXES + _LIBSNDFILE_SUFFIXES + _FFMPEG_SUFFIXES
"""Suffixes of what libsndfile or, if torchcodec is installed, FFmpeg reads: audio, and videos for their sound."""

AUDIO_KEYS = ("audio_filepath", "audio_filename")
"""Names of the audio file in NeMo's manifests, which others use as well."""


class Entry(NamedTuple):
    """A span of audio that an input names, before the audio has been opened."""

    where: str
    """Position in the input, such as `speech.json:12`."""

    cut_id: str
    audio: Audio
    offset: float = 0.0
    """Start of the span in the file, in seconds."""

    duration: float | None = None
    """Length of the span in seconds; None for the rest of the file, and for a `LhotseCut`, which has its own span."""

    num_frames: int | None = None
    """Length of the span in samples at the rate of the file, for inputs that count samples."""

    labels: dict[str, Any] | None = None
    """Other values of the input, such as text, lang and speaker."""

    number: int | None = None
    """The number for which `Source.where` returns the position of this entry; None for that of its item.

    Cuts are written in the order of these numbers. A later entry of the same item with the same number replaces the
    earlier one, for instance if a tar turns out to hold two members with the name in a line.
    """

    first_frame: int | None = None
    """Start of the span in samples at the rate of the file, instead of `offset`."""

    channel: int | None = None
    """Channel of the file that the input names, counted from 0; None if it names none, and for a `LhotseCut`."""

    meaning: "Meaning | None" = None
    """What the names of its row mean; None for an input without names."""


@runtime_checkable
class Source(Protocol):
    """One input. Sources are small, because they are pickled to other processes along with some of their items."""

    @property
    def path(self) -> Path | str:
        """The manifest or folder, as the caller gave it: a path, or a URL."""

    @property
    def format(self) -> InputFormat:
        """The format that it is read as."""

    @property
    def items_per_task(self) -> int | None:
        """Number of items that a process is given at a time; None for the number that suits the probe mode."""

    def items(self) -> Iterator[Any]:
        """Yields items (lines, paths, row numbers, shards), each of which holds any number of entries."""

    def entries(self, number: int, item: Any) -> Iterator[Entry]:
        """Parses an item; `number` is its index, counted from 1.

        Yields:
            The entries: none for a blank line, one for any other line, one for each member of a shard.

        Raises:
            ManifestError: The item cannot be parsed; the message names its position.
        """

    def where(self, number: int) -> str:
        """Returns the position in the input of the item, or of an entry, with this number.

        It is empty if the location of the audio is the position.
        """

    def count(self) -> int | None:
        """Returns the approximate number of items, or None if counting would cost as much as reading them."""


@runtime_checkable
class ReadsFiles(Protocol):
    """A source whose entries depend on files other than its items, such as shards and the manifests of shards.

    The result of an item is not taken from an interrupted run if one of them has changed.
    """

    def files(self, item: Any) -> list[str]:
        """Returns the absolute paths or URLs of the files that the entries of an item depend on."""


def seconds(row: dict[str, Any], key: str, where: str) -> float | None:
    """Returns a value in seconds, or None if the key is missing or null.

    Raises:
        ManifestError: The value is not a number, is negative, or is too large.
    """
    value = row.get(key)
    if value is None:
        return None
    if not is_number(value, MAX_SECONDS):
        raise ManifestError(f"{where}: {key} is {value!r}. Give seconds as a number from 0 to {MAX_SECONDS:g}.")
    return float(value)


def is_number(value: Any, limit: float) -> bool:
    """Returns whether a value of an input is a number from 0 up to a limit, which is not included; True is none."""
    return type(value) in (int, float) and 0 <= value < limit


def span_suffix(offset: float, duration: float | None) -> str:
    """Returns the end of a cut id that distinguishes several spans of one file; both values are in seconds."""
    return f"@{offset:.3f}" if duration is None else f"@{offset:.3f}+{duration:.3f}"


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
