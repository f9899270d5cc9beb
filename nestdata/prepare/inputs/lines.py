"""Manifests as lines or JSON objects: a path or a URL, gzip-compressed or not, in bounded memory.

JSON objects are one per line, as NeMo and Lhotse write them, or those of one array, or spread over several lines each,
as `json.dump` of a list, `json.dump(..., indent=2)` and `jq` write them.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import orjson

from nestdata.audio.file_kind import special_file_kind
from nestdata.errors import ManifestError, StorageError
from nestdata.storage import is_url, storage
from nestdata.wrong_path import wrong_path

MAX_LINE_BYTES = 1 << 24
"""Length of the longest line. A cut with an alignment of every word of a day is a few megabytes."""

ONE_PER_LINE = "Write one object per line, for instance with `jq -c '.[]'`."
"""What to do about a JSON array where it is not read."""

# Length of the longest manifest whose objects are not one per line, which is held in memory.
_MAX_SPREAD_BYTES = 1 << 28
_BUFFER_BYTES = 1 << 16
# Between objects, and around those of an array.
_BETWEEN = re.compile(r"[\s,\[\]]*")


class LineSource:
    """The methods of `Source` for a manifest of which each line or JSON object is an item.

    A format whose records may take several lines yields items that hold a line number, and gives it to its entries as
    `Entry.number`.
    """

    items_per_task: ClassVar[None] = None
    num_header_lines: ClassVar[int] = 0
    has_line_numbers: ClassVar[bool] = False
    """Whether entries have line numbers of their own; otherwise, their numbers are those of the lines after the header.
    """

    path: Path | str
    is_spread: bool = False
    """Whether the items are JSON objects that are not one per line."""

    def items(self) -> Iterator[Any]:
        """Yields the lines after the header, or the objects as JSON texts."""
        if self.is_spread:
            yield from spread_objects(self.path)
            return
        with open_lines(self.path) as file:
            yield from islice(file, self.num_header_lines, None)

    def where(self, number: int) -> str:
        """Returns the path and the number of the line, counted from 1 with the header, or that of the object."""
        if self.is_spread:
            return f"{self.path!s}, object {number}"
        return f"{self.path!s}:{number if self.has_line_numbers else number + self.num_header_lines}"

    def count(self) -> int | None:
        """Returns the number of lines after the header; None if it is not that of the items."""
        lines = None if self.is_spread else count_lines(self.path)
        return None if lines is None else lines - self.num_header_lines


class LineReader:
    """The lines of an open manifest; one of more than `MAX_LINE_BYTES` is an error."""

    def __init__(self, name: str, file: BufferedReader) -> None:
        self._name = name
        self._num_lines = 0
        self.file = file

    def readline(self) -> bytes:
        """Returns the next line, with its newline; empty at the end."""
        return next(iter(self), b"")

    def __iter__(self) -> Iterator[bytes]:
        read, limit = self.file.readline, MAX_LINE_BYTES + 1
        while line := read(limit):
            self._num_lines += 1
            if len(line) == limit:
                raise ManifestError(
                    f"{self._name}:{self._num_lines}: a line of more than {MAX_LINE_BYTES >> 20} MiB, which begins "
                    f"with {line[:80]!r}. Check that this is a manifest, and divide or drop the line."
                )
            yield line


@contextmanager
def open_lines(path: Path | str) -> Iterator[LineReader]:
    """Opens a manifest, gzip-compressed or not, for reading lines; skips a byte order mark.

    Args:
        path: A local path, or a URL as a `str`.

    Raises:
        ManifestError: It is not a regular file, or a read fails. Reads raise it, too, if a line is too long.
        StorageError: The store cannot be read.
    """
    if isinstance(path, Path):
        check_manifest(path)
    try:
        stream = path.open("rb") if isinstance(path, Path) else storage().open_stream(path)
        lines: BufferedReader = stream
        if str(path).endswith(".gz"):
            lines = BufferedReader(gzip.GzipFile(fileobj=stream), _BUFFER_BYTES)
        with stream, lines as file:
            if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
                file.read(len(codecs.BOM_UTF8))
            yield LineReader(str(path), file)
    except (OSError, EOFError, zlib.error) as error:
        raise ManifestError(f"{path}: cannot be read ({error}). Check the file and copy it again.") from error


def numbered_lines(location: str) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a manifest with their numbers, counted from 1; errors are those of `open_lines`."""
    with open_lines(location if is_url(location) else Path(location)) as lines:
        yield from enumerate(lines, start=1)


def count_lines(path: Path | str) -> int | None:
    """Returns the number of lines of a manifest, for progress bars; None at a URL, where counting takes a download."""
    if isinstance(path, str):
        return None
    with open_lines(path) as lines:
        return sum(block.count(b"\n") for block in iter(lambda: lines.file.read(1 << 20), b""))


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


def parse_object(line: bytes, where: str) -> dict[str, Any] | None:
    """Parses one line; returns None for a blank one.

    Args:
        line: The line.
        where: Its position, for messages.

    Raises:
        ManifestError: It is not a JSON object.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if not line.strip():
            return None
        try:
            row = json.loads(line)  # accepts NaN, which Python writes for missing scores
        except (ValueError, RecursionError):
            raise ManifestError(
                f"{where}: not JSON ({error.msg}, at character {error.pos + 1}). Every line must be one JSON object; "
                "fix or drop it."
            ) from error
    if not isinstance(row, dict):
        kind = "a JSON array" if isinstance(row, list) else type(row).__name__
        raise ManifestError(f"{where}: {kind} where a JSON object was expected. {ONE_PER_LINE}")
    return row


def is_spread(line: bytes) -> bool:
    """Returns whether the objects of a manifest are not one per line, given its first line that is not blank."""
    return line.lstrip().startswith(b"[") or line.strip() == b"{"


def spread_objects(path: Path | str) -> Iterator[bytes]:
    """Yields the objects of a JSON array, or objects one after the other, as JSON texts. Holds the whole manifest.

    Raises:
        ManifestError: It is not JSON, ends before its end, has something other than objects, or is too long; or reading
            fails.
        StorageError: The store cannot be read.
    """
    with open_lines(path) as lines:
        content = lines.file.read(_MAX_SPREAD_BYTES + 1)
    if len(content) > _MAX_SPREAD_BYTES:
        raise ManifestError(f"{path}: more than {_MAX_SPREAD_BYTES >> 20} MiB in one JSON value. {ONE_PER_LINE}")
    text, scan = content.decode(errors="surrogateescape").strip(), json.JSONDecoder().raw_decode
    number, end, depth = 1, 0, 0
    while True:
        between = _BETWEEN.match(text, end)
        start = between.end() if between else end
        depth += text.count("[", end, start) - text.count("]", end, start)
        if start == len(text):
            break
        try:
            value, end = scan(text, start)
        except (ValueError, RecursionError) as error:
            raise ManifestError(
                f"{path}, object {number}: not JSON ({getattr(error, 'msg', error)}). Fix or drop it."
            ) from None
        if not isinstance(value, dict):
            raise ManifestError(
                f"{path}, object {number}: {type(value).__name__} where a JSON object was expected. Write "
                "objects with a key audio_filepath, or a list of paths, one per line and without JSON."
            )
        yield text[start:end].encode(errors="surrogateescape")
        number += 1
    if depth:
        problem = "ends here, before the end of its JSON" if depth > 0 else "a bracket too many before it"
        raise ManifestError(f"{path}, object {number}: {problem}. Copy it again.")


def _why_no_manifest(path: Path) -> str:
    if path.is_dir():
        return f"{path}: a folder where a file was expected. Give a file in it, or leave out --format."
    if kind := special_file_kind(path):
        return (
            f"{path}: {kind}, not a file. Manifests are opened more than once, so process substitution and devices "
            "do not work. Write the manifest to a file, and give that."
        )
    return f"{path}: {wrong_path(path, 'audio')}{' Separate inputs by spaces.' if ',' in path.name else ''}"
