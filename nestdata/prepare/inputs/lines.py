"""Manifests as lines: a path or a URL, gzip-compressed or not, in bounded memory."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import orjson

from nestdata.audio.file_kind import special_file_kind
from nestdata.errors import ManifestError, StorageError
from nestdata.prepare.inputs.entry import where_paths_start
from nestdata.storage import is_url, storage

MAX_LINE_BYTES = 1 << 24
"""Length of the longest line. A cut with an alignment of every word of a day is a few megabytes."""

ONE_PER_LINE = "Write one object per line, for instance with `jq -c '.[]'`."
"""What to do about a JSON array where it is not read."""

# A manifest may be this many times as long as its gzip stream, which is ten times what lines of a manifest reach, and
# somewhat more if it is short. Gzip can expand a thousandfold.
_MAX_RATIO, _MAX_EXPANDED = 200, 1 << 24
_BUFFER_BYTES = 1 << 16


class LineSource:
    """The methods of `Source` for a manifest of which each line is an item.

    A format whose records may take several lines yields items that hold a line number, and gives it to its entries as
    `Entry.number`.
    """

    items_per_task: ClassVar[None] = None
    num_header_lines: ClassVar[int] = 0
    has_line_numbers: ClassVar[bool] = False
    """Whether entries have line numbers of their own; otherwise, their numbers are those of the lines after the header.
    """

    path: Path | str

    def items(self) -> Iterator[Any]:
        """Yields the lines after the header."""
        with open_lines(self.path) as file:
            yield from islice(file, self.num_header_lines, None)

    def where(self, number: int) -> str:
        """Returns the path and the line number, counted from 1 with the header."""
        return f"{self.path!s}:{number if self.has_line_numbers else number + self.num_header_lines}"

    def count(self) -> int | None:
        """Returns the number of lines after the header."""
        lines = count_lines(self.path)
        return None if lines is None else lines - self.num_header_lines


def numbered_lines(location: str) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a manifest with their numbers, counted from 1.

    Raises:
        ManifestError: It is not a regular file, or is damaged.
        StorageError: The store cannot be read.
    """
    with open_lines(location if is_url(location) else Path(location)) as file:
        yield from enumerate(file, start=1)


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
    if isinstance(row, list):
        raise ManifestError(f"{where}: a JSON array where a JSON object was expected. {ONE_PER_LINE}")
    if not isinstance(row, dict):
        raise ManifestError(f"{where}: {type(row).__name__} where a JSON object was expected. Fix or drop it.")
    return row


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


class LineReader:
    """The lines of an open manifest; one of more than `MAX_LINE_BYTES` is an error.

    Reading takes as long as iterating over the file itself.
    """

    def __init__(self, name: str, file: BufferedReader) -> None:
        self._name = name
        self._file = file
        self._num_lines = 0

    def readline(self) -> bytes:
        """Returns the next line, with its newline; empty at the end.

        Raises:
            ManifestError: It is too long.
        """
        return next(iter(self), b"")

    def start(self) -> bytes:
        """Returns the bytes that are buffered, the next ones at least, without reading them."""
        return self._file.peek()

    def __iter__(self) -> Iterator[bytes]:
        read, limit = self._file.readline, MAX_LINE_BYTES + 1
        while line := read(limit):
            self._num_lines += 1
            if len(line) == limit:
                raise ManifestError(
                    f"{self._name}:{self._num_lines}: a line of more than {MAX_LINE_BYTES >> 20} MiB, which begins "
                    f"with {line[:80]!r}. Check that this is a manifest, and divide or drop the line."
                )
            yield line

    def read(self, num_bytes: int) -> bytes:
        """Returns up to a number of bytes; empty at the end."""
        return self._file.read(num_bytes)


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


def _opened(path: Path | str) -> BufferedReader:
    stream = path.open("rb") if isinstance(path, Path) else storage().open_stream(path)
    return _expanded(str(path), stream) if str(path).endswith(".gz") else stream


def _expanded(name: str, stream: BufferedIOBase) -> io.BufferedReader:
    """Returns the content of a gzip stream, which is closed along with the result.

    Reads raise ManifestError if the stream expands more than any manifest does, and otherwise the errors of `gzip`.
    """
    return io.BufferedReader(_Expanded(name, stream), _BUFFER_BYTES)


class _Expanded(io.RawIOBase):
    def __init__(self, name: str, stream: BufferedIOBase) -> None:
        self._name = name
        self._stream = stream
        self._file = gzip.GzipFile(fileobj=stream, mode="rb")
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the standard library says WriteableBuffer
        count = self._file.readinto(buffer)
        self._num_bytes += count
        if self._num_bytes > _MAX_EXPANDED + _MAX_RATIO * self._stream.tell():
            raise ManifestError(
                f"{self._name}: {self._stream.tell()} bytes of gzip expand to more than {self._num_bytes} bytes, which "
                "no manifest does. Check where the file comes from; if it is right, decompress it first."
            )
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            self._stream.close()
        super().close()


def _why_no_manifest(path: Path) -> str:
    if path.is_dir():
        return f"{path}: a folder where a file was expected. Give a file in it, or leave out --format."
    if kind := special_file_kind(path):
        return (
            f"{path}: {kind}, not a file. Manifests are opened more than once, so process substitution and devices "
            "do not work. Write the manifest to a file, and give that."
        )
    advice = "Separate inputs by spaces." if "," in path.name else where_paths_start(path)
    return f"{path}: no such file or folder. {advice}"
