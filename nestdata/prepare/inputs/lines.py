"""Manifests as lines or JSON objects: a path or a URL, gzip-compressed or not, in bounded memory.

JSON objects are one per line, as NeMo and Lhotse write them, or in one array, or spread over several lines each, as
`json.dump` of a list, `json.dump(..., indent=2)` and `jq` write them.
"""

import codecs
import gzip
import json
import re
import weakref
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import orjson

from nestdata.audio.file_kind import special_file_kind
from nestdata.errors import ManifestError, StorageError
from nestdata.prepare.inputs.entry import Entry
from nestdata.storage import is_url, storage
from nestdata.wrong_path import wrong_path

MAX_LINE_BYTES = 1 << 24
"""Length of the longest line. A cut with an alignment of every word of a day is a few megabytes."""

ONE_PER_LINE = "Write one object per line, for instance with `jq -c '.[]'`."
"""What to do about a JSON array where it is not read."""

# Length of the longest manifest whose objects are not one per line, which is held in memory.
_MAX_SPREAD_BYTES = 1 << 28
_BUFFER_BYTES = 1 << 16
# Between objects, and around the objects of an array.
_BETWEEN = re.compile(r"[\s,\[\]]*")


class FirstLines(NamedTuple):
    """The lines of a manifest that tell its format."""

    first: bytes
    text: bytes
    """The first line that is not blank, by which most formats are detected; empty if there is none."""

    number: int
    """The number of `text`, counted from 1."""

    second: bytes
    """The line behind `text`; empty if this is the start of a JSON array."""


class Manifest:
    """A manifest, which is opened once: for its first lines, which tell its format, and then for all of it.

    It stays open until `close`, or until nobody refers to it any more. A pickled copy is closed. Only one iterator at a
    time is valid, because all of them read the same file: a new one goes back to its start, and so do `head` and the
    first use of `first_lines` and `is_spread`. Neither pickling nor `repr` reads, so both may happen during an
    iteration. All methods that read raise ManifestError if it is not a regular file, a read fails or a line is too
    long, and StorageError if the store cannot be read.

    Args:
        path: A local path, or a URL as a `str`.
        is_spread: Whether its JSON objects are not one per line; None if the first line tells it.
    """

    def __init__(self, path: Path | str, is_spread: bool | None = None) -> None:
        self.path = path
        self._file: BufferedReader | None = None
        if is_spread is not None:
            self.is_spread = is_spread

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest, (self.path, vars(self).get("is_spread"))

    def __repr__(self) -> str:
        return f"Manifest({self.path!r})"

    def head(self, num_bytes: int) -> bytes:
        """Returns the first bytes, fewer than a buffer, without a byte order mark of UTF-8."""
        with self._from_start() as file:
            return file.peek(num_bytes)[:num_bytes]

    @cached_property
    def first_lines(self) -> FirstLines:
        """The first lines. If a JSON array does not fit the buffer, `text` is its start: the array may be too long."""
        lines, start = self.lines(), self.head(_BUFFER_BYTES).lstrip()
        if start.startswith(b"[") and b"\n" not in start:
            return FirstLines(start, start, 1, b"")
        first = text = next(lines, b"")
        number = 1
        while text and not text.strip():
            text, number = next(lines, b""), number + 1
        return FirstLines(first, text, number, b"" if text.startswith(b"[") else next(lines, b""))

    @cached_property
    def is_spread(self) -> bool:
        """Whether it is JSON, and its objects are not one per line."""
        line = self.first_lines.text
        return line.lstrip().startswith(b"[") or line.strip() == b"{"

    def lines(self) -> Iterator[bytes]:
        """Yields all lines with their newlines, without a byte order mark."""
        limit, number = MAX_LINE_BYTES + 1, 0
        with self._from_start() as file:
            while line := file.readline(limit):
                number += 1
                if len(line) == limit:
                    raise ManifestError(
                        f"{self.path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB, which begins "
                        f"with {line[:80]!r}. Check that this is a manifest, and divide or drop the line."
                    )
                yield line

    def objects(self) -> Iterator[bytes]:
        """Yields the objects of a JSON array, or objects one after the other, as JSON texts. Holds the whole manifest.

        Raises:
            ManifestError: It is not JSON, ends before its end, has something other than objects, or is too long.
        """
        with self._from_start() as file:
            content = file.read(_MAX_SPREAD_BYTES + 1)
        if len(content) > _MAX_SPREAD_BYTES:
            size = _MAX_SPREAD_BYTES >> 20
            raise ManifestError(f"{self.path}: more than {size} MiB in one JSON value. {ONE_PER_LINE}")
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
                    f"{self.path}, object {number}: not JSON ({getattr(error, 'msg', error)}). Fix or drop it."
                ) from None
            if not isinstance(value, dict):
                raise ManifestError(
                    f"{self.path}, object {number}: {type(value).__name__} where a JSON object was expected. Write "
                    "objects with a key audio_filepath, or a list of paths, one per line and without JSON."
                )
            yield text[start:end].encode(errors="surrogateescape")
            number += 1
        if depth:
            problem = "ends here, before the end of its JSON" if depth > 0 else "a bracket too many before it"
            raise ManifestError(f"{self.path}, object {number}: {problem}. Copy it again.")

    def count(self) -> int | None:
        """Returns the number of lines, for progress bars; None at a URL, where counting takes a download."""
        if isinstance(self.path, str):
            return None
        with self._from_start() as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))

    def close(self) -> None:
        """Closes the file, which is opened again if more is read."""
        if self._file is not None:
            self._file = None
            self._close_files()

    @contextmanager
    def _from_start(self) -> Iterator[BufferedReader]:
        """Yields the open file, at its first byte behind a byte order mark."""
        try:
            if self._file is None:
                self._file = self._open()
            else:
                self._file.seek(0)
            if self._file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
                self._file.read(len(codecs.BOM_UTF8))
            yield self._file
        except (OSError, EOFError, zlib.error) as error:
            self.close()
            raise ManifestError(f"{self.path}: cannot be read ({error}). Check the file and copy it again.") from error

    def _open(self) -> BufferedReader:
        if isinstance(self.path, Path):
            check_manifest(self.path)
        files = ExitStack()
        self._close_files = weakref.finalize(self, files.close)
        stream: BufferedReader = files.enter_context(
            self.path.open("rb") if isinstance(self.path, Path) else storage().open_stream(self.path)
        )
        if not str(self.path).endswith(".gz"):
            return stream
        return files.enter_context(BufferedReader(gzip.GzipFile(fileobj=stream), _BUFFER_BYTES))


class LineSource:
    """The methods of `Source` for a manifest in which each line is an item.

    A format whose records may take several lines (see `table.py`) overrides `items` to yield records with their line
    numbers, and gives these numbers to its entries as `Entry.number`.
    """

    items_per_task: ClassVar[None] = None
    num_header_lines: ClassVar[int] = 0
    manifest: Manifest

    @property
    def path(self) -> Path | str:
        """The path or URL of the manifest."""
        return self.manifest.path

    def items(self) -> Iterator[Any]:
        """Yields the lines after the header, and closes the manifest."""
        yield from islice(self.manifest.lines(), self.num_header_lines, None)
        self.manifest.close()

    def where(self, number: int) -> str:
        """Returns the path with the number of the line, counted from 1, header included."""
        return f"{self.manifest.path!s}:{number + self.num_header_lines}"

    def count(self) -> int | None:
        """Returns the number of lines after the header; None if counting takes a download."""
        lines = self.manifest.count()
        return None if lines is None else lines - self.num_header_lines


class ObjectSource(LineSource):
    """The methods of `Source` for a manifest of JSON objects, which are one per line or not.

    A format overrides `entry`, which returns the entry of one object.
    """

    def items(self) -> Iterator[bytes]:
        """Yields the lines, or the objects as JSON texts, and closes the manifest."""
        yield from self.manifest.objects() if self.manifest.is_spread else self.manifest.lines()
        self.manifest.close()

    def entries(self, number: int, item: bytes) -> Iterator[Entry]:
        """Yields the entry of an object; none for a blank line."""
        where = self.where(number)
        row = parse_object(item, where)
        if row is not None:
            yield self.entry(where, row)

    def entry(self, where: str, row: dict[str, Any]) -> Entry:
        """Returns the entry of an object; `where` is its position, for messages. May modify the object."""
        raise NotImplementedError

    def where(self, number: int) -> str:
        """Returns the path with the number of the line or of the object, counted from 1."""
        return f"{self.manifest.path!s}{', object ' if self.manifest.is_spread else ':'}{number}"

    def count(self) -> int | None:
        """Returns the number of lines; None if items are not lines."""
        return None if self.manifest.is_spread else self.manifest.count()


def numbered_lines(location: str) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a manifest with their numbers, counted from 1; raises the errors of `Manifest`."""
    yield from enumerate(Manifest(location if is_url(location) else Path(location)).lines(), start=1)


def check_manifest(path: Path | str) -> None:
    """Checks that a manifest is a regular file or an object, without reading it.

    Raises:
        ManifestError: It does not exist, or is a directory, pipe, socket or device.
        StorageError: The store cannot be asked.
    """
    if isinstance(path, Path):
        if path.is_file():
            return
        problem = wrong_path(path, "audio") + (" Separate inputs by spaces." if "," in path.name else "")
        if path.is_dir():
            problem = "a folder where a file was expected. Give a file in it, or leave out --format."
        elif kind := special_file_kind(path):
            problem = (
                f"{kind}, not a file. Manifests are read more than once, so process substitution and devices do not "
                "work. Write the manifest to a file, and give that."
            )
        raise ManifestError(f"{path}: {problem}")
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
