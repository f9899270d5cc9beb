"""Entries and sources: the form that every input format is converted to.

An entry is a span of audio that an input names, before the audio has been opened. A source yields the entries of one
input in two steps, so that the work can be shared among processes: `items` runs in one process and only splits the
input into lines, paths, row numbers or shards; `entries` parses one item, in whichever process receives it.
"""

import codecs
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import quote

from nestdata.audio.file_kind import special_file_kind
from nestdata.errors import ManifestError, StorageError
from nestdata.prepare.inputs.audio import Audio
from nestdata.prepare.inputs.line_reader import LineReader, expanded
from nestdata.storage import has_scheme, is_url, storage

# Offsets and durations of this many seconds, about four months, or more are treated as mistakes.
MAX_SECONDS = 1e7

# Number of relative names that are looked up to find the folder that they start from.
_MAX_LOOKUPS = 100

AUDIO_SUFFIXES = (
    ".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".m4a", ".sph", ".w64", ".wma",
)  # fmt: skip

# Label names in the inputs, and the supervision fields that they become. Other values are kept as custom fields.
LABELS = {
    "text": "text",
    "sentence": "text",
    "transcription": "text",
    "lang": "language",
    "language": "language",
    "locale": "language",
    "speaker": "speaker",
    "speaker_id": "speaker",
}


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


@runtime_checkable
class Source(Protocol):
    """One input. Sources are small, because they are pickled to other processes along with some of their items."""

    @property
    def path(self) -> Path | str:
        """The manifest or folder, as the caller gave it: a path, or a URL."""

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
        """Returns the position in the input of the item, or of an entry, with this number."""

    def count(self) -> int | None:
        """Returns the approximate number of items, or None if counting would cost as much as reading them."""


@runtime_checkable
class ReadsFiles(Protocol):
    """A source whose entries depend on files other than its items, such as shards and the manifests of shards.

    The result of an item is not taken from an interrupted run if one of them has changed.
    """

    def files(self, item: Any) -> list[str]:
        """Returns the absolute paths or URLs of the files that the entries of an item depend on."""


def check_manifest(path: Path | str) -> None:
    """Checks that a manifest is a regular file or an object, without reading it.

    Raises:
        ManifestError: It does not exist, or is a directory, pipe, socket or device.
        StorageError: The store cannot be asked.
    """
    if isinstance(path, Path):
        if not path.is_file():
            raise ManifestError(_why_no_manifest(path))
        return
    try:
        storage().info(path)
    except StorageError as error:
        if error.kind != "missing":
            raise
        raise ManifestError(f"{path}: no such object. Check the URL; a folder needs a slash at its end.") from None


@contextmanager
def open_lines(path: Path | str) -> Iterator[LineReader]:
    """Opens a manifest, gzip-compressed or not, for reading lines; skips a byte order mark.

    Args:
        path: A local path, or a URL as a `str`.

    Raises:
        ManifestError: It is not a regular file, or a read fails. Reads raise it, too, if a line is too long, or if
            gzip expands without bound.
        StorageError: The store cannot be read.
    """
    if isinstance(path, Path):
        check_manifest(path)
    try:
        with _opened(path) as file:
            if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
                file.read(len(codecs.BOM_UTF8))
            yield LineReader(str(path), file)
    except (OSError, EOFError, zlib.error) as error:
        raise ManifestError(f"{path}: cannot be read ({error}). Check the file and copy it again.") from error


def count_lines(path: Path | str) -> int | None:
    """Returns the number of lines of a manifest, for progress bars; None at a URL, where counting takes a download."""
    if isinstance(path, str):
        return None
    with open_lines(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


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


def id_of_name(path: str, name: str, root: str) -> str:
    """Returns the id of the cut of a file in a manifest; see `cut_id_of`.

    Args:
        path: The absolute path or URL of the file.
        name: The name in the manifest. If it is relative, the id does not depend on the location of the manifest.
        root: The folder that ids are relative to.
    """
    cut_id = cut_id_of(path, root)
    is_outside = cut_id.startswith("/") or "://" in cut_id
    return relative_id(cut_id, root) if is_outside and not (name.startswith("/") or is_url(name)) else cut_id


def base_directory(names: Iterable[str], folders: Sequence[str], default: str) -> str:
    """Returns the absolute path of the folder that relative names of files start from.

    Args:
        names: The names, of which only the first are looked up. Absolute paths, URLs and commands decide nothing.
        folders: Folders in order of preference: the first in which a name exists is returned.
        default: Returned if no name exists.
    """
    relative = (name for name in names if name and not os.path.isabs(name) and not has_scheme(name))
    for name in islice(relative, _MAX_LOOKUPS):
        for folder in folders:
            if os.path.exists(os.path.join(folder, name)):
                return folder
    return default


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


def check_command(command: str, where: str, *, allowed: bool) -> None:
    """Raises ManifestError if an input gives a command instead of a file and commands are not allowed."""
    if not allowed:
        raise ManifestError(
            f"{where}: a command instead of a file: {command[:120]!r}. Commands are not run by default. If "
            "you trust it, allow it with --allow-commands; or write the audio to files first."
        )


def where_paths_start(path: Path) -> str:
    """Returns a hint for a path that does not exist."""
    return "Check the path." if path.is_absolute() else f"Check the path, which starts from {os.getcwd()}."


def _opened(path: Path | str) -> BufferedReader:
    stream = path.open("rb") if isinstance(path, Path) else storage().open_stream(path)
    return expanded(str(path), stream) if str(path).endswith(".gz") else stream


def _resolve_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    key = os.path.normpath("/" + key).lstrip("/") if "/." in rest or "//" in rest else key
    # Names in manifests are plain, and the path of a web address is percent-encoded.
    return f"{scheme}://{bucket}/{quote(key, safe='/%') if scheme.startswith('http') else key}"


def _why_no_manifest(path: Path) -> str:
    if path.is_dir():
        return f"{path}: a folder where a file was expected. Give a file in it, or leave out --format."
    if kind := special_file_kind(path):
        return (
            f"{path}: {kind}, not a file. Manifests are opened more than once, so process substitution and devices "
            "do not work. Write the manifest to a file, and give that."
        )
    return f"{path}: no such file or folder. {where_paths_start(path)}"
