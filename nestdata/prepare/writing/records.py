"""Records: what the corpus writer keeps of each cut until it has sorted all of them, in a file of its own.

A record has a fixed size. The file is memory-mapped, with at most one block resident.
"""

import hashlib
import mmap
from collections.abc import Iterator
from io import BufferedIOBase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.errors import ManifestError

RECORD = np.dtype(
    [
        ("num_samples", "<i8"),
        ("offset", "<i8"),  # of the line in cuts.jsonl, in bytes
        ("id", "<u8"),  # a digest of the cut id
        ("start_us", "<i8"),
        ("channel", "<i4"),
        ("source", "<i4"),  # index of the source
        ("number", "<i8"),  # of the item in its source, counted from 1
        ("begin", "<i8"),  # first byte of the audio in its shard; without an address, the time of its file in ns
        ("extent", "<u8"),  # shard << 32 | bytes of the audio or its file; `NO_SHARD` is the shard without an address
        ("crc32", "<u4"),
        ("has_crc32", "<u4"),
    ]
)
BLOCK = 1 << 20
"""Number of records that are processed at a time."""


class Records:
    """The file of records, memory-mapped, with at most one block resident."""

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, 0)
        self._array = np.frombuffer(self._map, RECORD)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int) -> np.void:
        record: np.void = self._array[index]
        return record

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields blocks of records, each with the index of its first record."""
        for start in range(0, len(self), BLOCK):
            yield start, self._array[start : start + BLOCK]
            self._map.madvise(mmap.MADV_DONTNEED)

    def column(self, name: str) -> NDArray[Any]:
        """Returns a copy of one field, at most 8 bytes per record, shape (num_records,)."""
        values = np.empty(len(self), RECORD[name])
        for start, block in self.blocks():
            values[start : start + len(block)] = block[name]
        return values

    def move(self, first: int, stop: int, to: int, num_bytes: int) -> None:
        """Moves the records [first, stop) forward to index `to`, and shifts their line offsets by `num_bytes`."""
        for start in range(first, stop, BLOCK):  # ascending, so that no block overwrites the next one
            block = self._array[start : min(start + BLOCK, stop)].copy()
            block["offset"] += num_bytes
            self._array[to : to + len(block)] = block
            to += len(block)

    def truncate(self, num_records: int) -> None:
        """Drops all records from index `num_records` on."""
        self._array = self._array[:num_records]


class LengthOrder:
    """The order of all records by length, in which those of the same length stay in theirs. Takes 8 bytes per record.

    Raises:
        ManifestError: A cut is so long that its length and index do not fit into a sort key of 63 bits.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        keys = records.column("num_samples")
        self._bits = len(keys).bit_length()
        if int(keys.max()).bit_length() + self._bits > 63:
            raise ManifestError(
                f"a cut of {int(keys.max())} samples is too long to be sorted. Divide it with --window-seconds."
            )
        # Length and index share one number, so that the sort is in place.
        keys <<= self._bits
        for start in range(0, len(keys), BLOCK):
            block = keys[start : start + BLOCK]
            block |= np.arange(start, start + len(block))
        keys.sort()
        self._keys = keys

    def write_lengths(self, file: BufferedIOBase) -> None:
        """Writes the lengths in samples, ascending."""
        for start in range(0, len(self._keys), BLOCK):
            file.write((self._keys[start : start + BLOCK] >> self._bits).tobytes())

    def write(self, file: BufferedIOBase, name: str) -> None:
        """Writes one field of the records, in 8 bytes of memory per record."""
        values, mask = self._records.column(name), (1 << self._bits) - 1
        for start in range(0, len(self._keys), BLOCK):
            file.write(values[self._keys[start : start + BLOCK] & mask].tobytes())

    def lengths(self) -> NDArray[np.int64]:
        """Returns the lengths in samples, ascending, shape (num_records,). Nothing can be written afterwards."""
        self._keys >>= self._bits
        return self._keys


def fingerprint(records: Records, sampling_rate: int) -> str:
    """Returns a digest of ids, spans, channels and lengths of all cuts, in their order."""
    content = hashlib.blake2b(str(sampling_rate).encode(), digest_size=16)
    for _, block in records.blocks():
        for name in ("id", "start_us", "channel", "num_samples"):
            content.update(block[name].tobytes())
    return content.hexdigest()


def repeated_values(values: NDArray[Any]) -> NDArray[Any]:
    """Returns the values that occur more than once in an array, ascending, each one once; sorts the array in place."""
    values.sort()
    is_repeated = values[1:] == values[:-1]
    is_repeated[1:] &= ~is_repeated[:-1]
    repeated: NDArray[Any] = values[1:][is_repeated]
    return repeated
