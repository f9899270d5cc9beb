"""Writes the files of a corpus from what was found, holding no more than 16 bytes a cut at any time.

While cuts come in, all that is known of each goes to a file of fixed-size records; lengths are sorted and ids compared
when they are all there.
"""

import hashlib
import json
import mmap
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.errors import ManifestError
from nestdata.prepare.probe import Cut, Reject

_RECORD = np.dtype(
    [
        ("num_samples", "<i8"),
        ("offset", "<i8"),  # of the line in cuts.jsonl
        ("id", "<u8"),  # a digest
        ("start_us", "<i8"),
        ("channel", "<i4"),
        ("source", "<i4"),
        ("number", "<i8"),  # of the item in its source
    ]
)
_BLOCK = 1 << 20
# Hours by speaker are counted for so many; with more, they are no longer a picture of anything.
_MOST_SPEAKERS = 100_000


@dataclass(frozen=True, slots=True)
class Found:
    """What was made of some items of one source, in order; made in any process, written by one."""

    num_entries: int
    lines: bytes
    records: NDArray[Any]
    rejects: list[Reject]
    num_resampled: int
    samples_by: dict[str, Counter[str]]
    """Number of samples of each language and speaker, under `language` and `speaker`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What the files of a corpus hold."""

    num_cuts: int
    num_bytes: int
    total_samples: int
    shortest: int
    longest: int
    fingerprint: str
    num_resampled: int
    rejected: dict[str, int] = field(default_factory=dict)
    samples_by: dict[str, Counter[str]] = field(default_factory=dict)


class Collector:
    """Gathers what is found in some items of one source."""

    def __init__(self) -> None:
        self.rejects: list[Reject] = []
        self.num_entries = 0
        self._lines: list[bytes] = []
        self._digests: list[bytes] = []
        self._columns: list[tuple[int, int, int, int, int]] = []
        self._num_bytes = 0
        self._num_resampled = 0
        self._samples_by: dict[str, Counter[str]] = {"language": Counter(), "speaker": Counter()}

    def add(self, cut: Cut, number: int, where: str) -> None:
        """Takes a cut of the number-th item."""
        row, num_samples = cut
        try:
            line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError as error:  # names of files may hold bytes that are not Unicode
            detail = f"its name or a label is not Unicode: {error}"
            self.rejects.append(Reject(where, row["id"], "unreadable", detail))
            return
        self._lines.append(line)
        self._digests.append(hashlib.blake2b(row["id"].encode(), digest_size=8).digest())
        self._columns.append((num_samples, self._num_bytes, round(row["start"] * 1e6), row["channel"], number))
        self._num_bytes += len(line)
        self._num_resampled += "transforms" in row["recording"]
        for label in row["supervisions"][:1]:
            for kind, counter in self._samples_by.items():
                if value := label.get(kind):
                    counter[value] += num_samples

    def found(self) -> Found:
        """Returns all of it."""
        records = np.zeros(len(self._lines), _RECORD)
        if self._lines:
            columns = ("num_samples", "offset", "start_us", "channel", "number")
            for name, values in zip(columns, zip(*self._columns, strict=True), strict=True):
                records[name] = values
            records["id"] = np.frombuffer(b"".join(self._digests), "<u8")
        return Found(
            num_entries=self.num_entries,
            lines=b"".join(self._lines),
            records=records,
            rejects=self.rejects,
            num_resampled=self._num_resampled,
            samples_by=self._samples_by,
        )


class CorpusWriter:
    """Writes cuts.jsonl, rejected.jsonl and index.npy of one corpus."""

    def __init__(self, directory: Path) -> None:
        self.num_entries = 0
        self.rejected: Counter[str] = Counter()
        self.first_reject: Reject | None = None
        self._directory = directory
        self._files = ExitStack()
        self._files.callback((directory / "records.tmp").unlink, missing_ok=True)
        self._cuts = self._files.enter_context((directory / "cuts.jsonl").open("w+b"))
        # Names of files may hold bytes that are not Unicode; JSON has escapes for them.
        self._rejected = self._files.enter_context(
            (directory / "rejected.jsonl").open("w", encoding="utf-8", errors="backslashreplace")
        )
        self._records = self._files.enter_context((directory / "records.tmp").open("w+b"))
        self._num_bytes = 0
        self._num_resampled = 0
        self._samples_by: dict[str, Counter[str]] = {"language": Counter(), "speaker": Counter()}

    def add(self, found: Found, source: int) -> None:
        """Takes what was found next in the source of this number."""
        records = found.records.copy()
        records["offset"] += self._num_bytes
        records["source"] = source
        self._cuts.write(found.lines)
        self._records.write(records.tobytes())
        self._num_bytes += len(found.lines)
        self.num_entries += found.num_entries
        self._num_resampled += found.num_resampled
        for kind, counter in found.samples_by.items():
            if len(self._samples_by[kind]) <= _MOST_SPEAKERS:
                self._samples_by[kind].update(counter)
        self._reject(found.rejects)

    def finish(self, places: Sequence[Any], rate: int) -> Written | None:
        """Leaves out cuts whose id an earlier one has, sorts the rest, and writes the index.

        Args:
            places: The source of each number, whose `where` names the place of an item.
            rate: Goes into the fingerprint.

        Returns:
            What was written, or None where there is no cut.
        """
        for file in (self._cuts, self._records):
            file.flush()
        if not self._num_bytes:
            return None
        records = _Records(self._records.fileno())
        if len(again := self._repeated(records)):
            self._leave_out(records, again, places)
        lengths = self._write_index(records)
        return Written(
            num_cuts=len(records),
            num_bytes=self._num_bytes,
            total_samples=int(lengths.sum()),
            shortest=int(lengths[0]),
            longest=int(lengths[-1]),
            fingerprint=_fingerprint(records, rate),
            num_resampled=self._num_resampled,
            rejected=dict(self.rejected.most_common()),
            samples_by={k: v for k, v in self._samples_by.items() if 0 < len(v) <= _MOST_SPEAKERS},
        )

    def close(self) -> None:
        """Closes all files and removes the temporary one, also where the disk is full."""
        self._files.close()

    def _reject(self, rejects: Iterable[Reject]) -> None:
        for reject in rejects:
            self.first_reject = self.first_reject or reject
            self.rejected[reject.reason] += 1
            self._rejected.write(json.dumps(reject._asdict(), ensure_ascii=False) + "\n")

    def _repeated(self, records: "_Records") -> "array[int]":
        """Returns the rows of cuts whose id an earlier cut has, ascending."""
        again, nonfinite_sources = array("q"), _repeated_values(records.column("id"))
        first_rows = np.full(len(nonfinite_sources), -1)
        clashing: set[str] = set()  # ids that share their digest with another, earlier one
        for start, block in records.blocks() if len(nonfinite_sources) else ():
            places = np.searchsorted(nonfinite_sources, block["id"])
            places[places == len(nonfinite_sources)] = 0
            for i in np.flatnonzero(nonfinite_sources[places] == block["id"]).tolist():
                row, place = start + i, places[i]
                if first_rows[place] < 0:
                    first_rows[place] = row
                    continue
                cut_id = self._cut_at(records[row])["id"]
                if cut_id == self._cut_at(records[int(first_rows[place])])["id"] or cut_id in clashing:
                    again.append(row)
                else:
                    clashing.add(cut_id)
        return again

    def _leave_out(self, records: "_Records", rows: "array[int]", places: Sequence[Any]) -> None:
        """Moves lines and records together over those that are left out, in place."""
        for row in rows:
            self._reject_repeated(records[row], places)
        row_to, byte_to = rows[0], int(records[rows[0]]["offset"])
        for row, stop in pairwise(chain(rows, [len(records)])):
            first = row + 1
            if first < stop:
                begin = int(records[first]["offset"])
                end = int(records[stop]["offset"]) if stop < len(records) else self._num_bytes
                self._move_bytes(begin, end, byte_to)
                records.move(first, stop, row_to, byte_to - begin)
                row_to, byte_to = row_to + stop - first, byte_to + end - begin
        records.truncate(row_to)
        self._cuts.truncate(byte_to)
        self._num_bytes = byte_to

    def _reject_repeated(self, record: np.void, places: Sequence[Any]) -> None:
        cut = self._cut_at(record)
        detail = f"the id {cut['id']!r} stands for an earlier cut already"
        where = places[int(record["source"])].where(int(record["number"]))
        self._reject([Reject(where, cut["id"], "duplicate_id", detail)])
        label = (cut["supervisions"] or [{}])[0]
        for kind, counter in self._samples_by.items():
            if label.get(kind) in counter:
                counter[label[kind]] -= int(record["num_samples"])
        self._num_resampled -= "transforms" in cut["recording"]

    def _move_bytes(self, begin: int, end: int, to: int) -> None:
        while begin < end:
            self._cuts.seek(begin)
            block = self._cuts.read(min(1 << 24, end - begin))
            self._cuts.seek(to)
            self._cuts.write(block)
            begin, to = begin + len(block), to + len(block)
        self._cuts.flush()

    def _cut_at(self, record: np.void) -> dict[str, Any]:
        self._cuts.seek(int(record["offset"]))
        cut: dict[str, Any] = orjson.loads(self._cuts.readline())
        return cut

    def _write_index(self, records: "_Records") -> NDArray[np.int64]:
        """Sorts rows by length, those of one length in their order; returns the lengths."""
        keys = records.column("num_samples")
        bits = len(keys).bit_length()
        if int(keys.max()).bit_length() + bits > 63:
            raise ManifestError(
                f"a cut of {int(keys.max())} samples is too long to be sorted. Cut it with --window-seconds."
            )
        # Length and row in one number, so that they are sorted in place and take 8 bytes a cut.
        keys <<= bits
        for start in range(0, len(keys), _BLOCK):
            block = keys[start : start + _BLOCK]
            block |= np.arange(start, start + len(block))
        keys.sort()
        offsets = records.column("offset")
        # Not through a memory map, where a full disk would end the process.
        with (self._directory / "index.npy").open("wb") as file:
            header = {"descr": "<i8", "fortran_order": False, "shape": (2, len(keys))}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, len(keys), _BLOCK):
                file.write((keys[start : start + _BLOCK] >> bits).tobytes())
            for start in range(0, len(keys), _BLOCK):
                file.write(offsets[keys[start : start + _BLOCK] & ((1 << bits) - 1)].tobytes())
        keys >>= bits
        return keys


class _Records:
    """The file of records, of which no more than a block is resident."""

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, 0)
        self._rows = np.frombuffer(self._map, _RECORD)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> np.void:
        record: np.void = self._rows[row]
        return record

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields the records in blocks, each with the row that it starts at."""
        for start in range(0, len(self), _BLOCK):
            yield start, self._rows[start : start + _BLOCK]
            self._map.madvise(mmap.MADV_DONTNEED)

    def column(self, name: str) -> NDArray[Any]:
        """Returns a copy of one field, 8 bytes a record."""
        values = np.empty(len(self), _RECORD[name])
        for start, block in self.blocks():
            values[start : start + len(block)] = block[name]
        return values

    def move(self, first: int, stop: int, to: int, num_bytes: int) -> None:
        """Moves records down to the row `to`, along with their lines, which move by `num_bytes`."""
        for start in range(first, stop, _BLOCK):  # upwards, so that a block never overwrites the next
            block = self._rows[start : min(start + _BLOCK, stop)].copy()
            block["offset"] += num_bytes
            self._rows[to : to + len(block)] = block
            to += len(block)

    def truncate(self, num_records: int) -> None:
        """Forgets the records from a row on."""
        self._rows = self._rows[:num_records]


def _fingerprint(records: _Records, rate: int) -> str:
    content = hashlib.blake2b(str(rate).encode(), digest_size=16)
    for _, block in records.blocks():
        for name in ("id", "start_us", "channel", "num_samples"):
            content.update(block[name].tobytes())
    return content.hexdigest()


def _repeated_values(values: NDArray[Any]) -> NDArray[Any]:
    """Returns what stands more than once in an array, ascending and once each; sorts the array."""
    values.sort()
    is_repeated = values[1:] == values[:-1]
    is_repeated[1:] &= ~is_repeated[:-1]
    repeated: NDArray[Any] = values[1:][is_repeated]
    return repeated
