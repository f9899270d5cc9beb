"""Counts audio files whose bytes are equal to those of another file of the corpus.

Only files of one size are read: at first 4 KiB at each end, or nothing where checksums are known, and whole files only
if these are equal. This is done with `--probe decode`, which costs far more; in a corpus of files of one size, it would
add a fifth to the time of reading headers.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.corpus.addresses import NO_SHARD, AddressTable
from nestdata.corpus.file_version import path_of
from nestdata.errors import StorageError
from nestdata.prepare.pool import Pool
from nestdata.storage import is_url, storage

_END_BYTES = 4096
_BLOCK_BYTES = 4 << 20
_FILES_PER_TASK = 200
_LOW_BITS = 0xFFFFFFFF


class EqualFiles(NamedTuple):
    """Files with the bytes of an earlier file."""

    number: int
    """How many there are, beside the first of each content."""

    example: tuple[str, str] | None = None
    """Two of them that are equal, by their names."""


class _Span(NamedTuple):
    """The bytes of an audio file."""

    location: str
    offset: int
    length: int | None
    """None for the whole file."""

    def name(self) -> str:
        """Returns the path or URL, with the range of bytes in a tar."""
        if self.length is None or not self.offset:
            return self.location
        return f"{self.location} (byte {self.offset})"


def equal_files(directory: Path, addresses: AddressTable | None, pool: Pool) -> EqualFiles:
    """Counts files of a corpus with the bytes of an earlier one.

    Files of unknown size are not looked at: those that were not opened, and copies in the corpus directory.

    Args:
        directory: The corpus directory, which holds the cuts and their index.
        addresses: Where members of shards are.
        pool: The processes that read files.
    """
    if not (directory / "addresses.npy").is_file():
        return EqualFiles(0)
    rows = np.load(directory / "addresses.npy", mmap_mode="r")
    sizes = np.asarray(rows[1]) & _LOW_BITS
    rows_in_question = _repeated(sizes, np.flatnonzero(sizes))
    if not len(rows_in_question):
        return EqualFiles(0)
    with _Corpus(directory, rows, addresses) as corpus:
        # Cuts of one file count once.
        keys = np.array([corpus.key(row) for row in rows_in_question.tolist()], np.uint64)
        _, first = np.unique(keys, return_index=True)
        found = _repeated(sizes, rows_in_question[np.sort(first)])
        known = corpus.checksums(found)
        digests = known if known is not None else corpus.digests(found, _digest_of_ends, pool)
        found = found[digests != 0]
        found = found[_is_repeated(np.stack([sizes[found], digests[digests != 0]], axis=1))]
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        whole = corpus.digests(found, _digest_of_all, pool)
        for row, digest in zip(found.tolist(), whole.tolist(), strict=True):
            groups[int(sizes[row]), digest].append(row)
        equal = [sorted(group, key=corpus.line_start) for (_, digest), group in groups.items() if digest and group[1:]]
        if not equal:
            return EqualFiles(0)
        example = min(equal, key=lambda group: corpus.line_start(group[0]))
        names = corpus.span(example[0]).name(), corpus.span(example[1]).name()
        return EqualFiles(sum(len(group) - 1 for group in equal), names)


class _Corpus:
    """The spans of the audio of cuts, by their rows in the index."""

    def __init__(self, directory: Path, rows: NDArray[np.int64], addresses: AddressTable | None) -> None:
        self._rows = rows
        self._addresses = addresses
        self._starts = np.load(directory / "index.npy", mmap_mode="r")[1]
        self._lines = (directory / "cuts.jsonl").open("rb")

    def __enter__(self) -> "_Corpus":
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def line_start(self, row: int) -> int:
        """Returns the byte at which the line of a cut starts."""
        return int(self._starts[row])

    def key(self, row: int) -> int:
        """Returns a digest of where the audio of a cut is."""
        begin, extent = int(self._rows[0, row]), int(self._rows[1, row])
        is_file = extent >> 32 & _LOW_BITS == NO_SHARD
        text = self.span(row).location if is_file else f"{begin}/{extent}"
        return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), "little")

    def span(self, row: int) -> _Span:
        """Returns the bytes of the audio of a cut."""
        address = self._addresses[row] if self._addresses else None
        if address is not None:
            return _Span(*address[:3])
        self._lines.seek(self.line_start(row))
        return _Span(path_of(orjson.loads(self._lines.readline())), 0, None)

    def checksums(self, rows: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        """Returns the checksums of members, plus one; None if some are not known."""
        found = [self._addresses[row] if self._addresses else None for row in rows.tolist()]
        known = [address.crc32 for address in found if address is not None and address.crc32 is not None]
        return np.array(known, np.uint64) + np.uint64(1) if len(known) == len(rows) else None

    def digests(
        self, rows: NDArray[np.int64], digest: Callable[[list[_Span]], list[int]], pool: Pool
    ) -> NDArray[np.uint64]:
        """Returns the digests of the audio of cuts; 0 where it cannot be read."""
        tasks = (
            [self.span(row) for row in rows[first : first + _FILES_PER_TASK].tolist()]
            for first in range(0, len(rows), _FILES_PER_TASK)
        )
        return np.array([one for part in pool.map(digest, tasks) for one in part], np.uint64)


def _is_repeated(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns whether each value, or each row, occurs more than once."""
    if not len(values):
        return np.zeros(0, bool)
    _, inverse, counts = np.unique(values, axis=0, return_inverse=True, return_counts=True)
    repeated: NDArray[np.bool_] = (counts > 1)[inverse.reshape(-1)]
    return repeated


def _repeated(sizes: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the rows whose size is that of another one."""
    return rows[_is_repeated(sizes[rows])]


def _digest_of_ends(spans: list[_Span]) -> list[int]:
    return [_digest(span, _ends) for span in spans]


def _digest_of_all(spans: list[_Span]) -> list[int]:
    return [_digest(span, _blocks) for span in spans]


def _digest(span: _Span, parts: Callable[[int], Iterator[tuple[int, int]]]) -> int:
    """Returns a digest of parts of a file; 0 if it cannot be read."""
    content = hashlib.blake2b(digest_size=8)
    try:
        if is_url(span.location):
            assert span.length is not None  # an object is a member
            for start, number in parts(span.length):
                content.update(storage().read_range(span.location, span.offset + start, number))
        else:
            with open(span.location, "rb", buffering=0) as file:
                for start, number in parts(os.fstat(file.fileno()).st_size if span.length is None else span.length):
                    content.update(os.pread(file.fileno(), number, span.offset + start))
    except (OSError, ValueError, StorageError):
        return 0
    return int.from_bytes(content.digest(), "little")


def _ends(length: int) -> Iterator[tuple[int, int]]:
    if length <= 2 * _END_BYTES:
        yield 0, length
        return
    yield 0, _END_BYTES
    yield length - _END_BYTES, _END_BYTES


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(_BLOCK_BYTES, length - start)) for start in range(0, length, _BLOCK_BYTES))
