"""Writes the files of a corpus, with at most 16 bytes of memory per cut.

Cuts are added in order. Each one adds a line to `cuts.jsonl` and a record of fixed size to a temporary file. Once all
cuts are there, `CorpusWriter.finish` removes those with a repeated id and sorts the rest by length.
`nestdata.prepare.shard_writer` writes the shards that addresses refer to.
"""

import hashlib
import json
import mmap
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from io import BufferedIOBase
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.corpus.addresses import NO_SHARD
from nestdata.corpus.channels import is_mixed
from nestdata.errors import ManifestError
from nestdata.prepare.inputs.packed import PackedShar
from nestdata.prepare.probe import Cut, Reject
from nestdata.prepare.shard_writer import ShardStats, ShardWriter
from nestdata.prepare.speech.measures import SpeechTotals
from nestdata.storage import ObjectInfo

_RECORD = np.dtype(
    [
        ("num_samples", "<i8"),
        ("offset", "<i8"),  # of the line in cuts.jsonl, in bytes
        ("id", "<u8"),  # a digest of the cut id
        ("start_us", "<i8"),
        ("channel", "<i4"),
        ("source", "<i4"),  # index of the source
        ("number", "<i8"),  # of the item in its source, counted from 1
        ("begin", "<i8"),  # first byte of the audio in its shard
        ("extent", "<u8"),  # shard << 32 | bytes of the audio; the shard is `NO_SHARD` without an address
        ("crc32", "<u4"),
        ("has_crc32", "<u4"),
    ]
)
_LAYOUT = str(_RECORD.descr)
# The fields of a record that a worker knows, but the digest of the id.
_COLUMNS = (
    "num_samples", "offset", "start_us", "channel", "number", "begin", "extent", "crc32", "has_crc32",
)  # fmt: skip
# The channel in the fingerprint of a cut that is the average of all channels.
MIXED_CHANNEL = -1
# Number of records that are processed at a time.
_BLOCK = 1 << 20
# Hours are not counted by language or speaker if there are more names than this: the counts would not fit a report.
_MAX_NAMES = 100_000


@runtime_checkable
class _Source(Protocol):
    """The part of `nestdata.prepare.inputs.Source` that `CorpusWriter` uses."""

    def where(self, number: int) -> str: ...


@dataclass(frozen=True, slots=True)
class ProbedItems:
    """The cuts and rejects of consecutive items of one source, sent by a worker to the `CorpusWriter`."""

    num_entries: int
    """Number of entries among the items; blank lines do not count."""

    lines: bytes
    """The cuts as lines of `cuts.jsonl`."""

    records: NDArray[Any]
    """One record per cut, shape (num_cuts,), dtype `_RECORD`; offsets count from the start of `lines`."""

    rejects: list[Reject]
    num_resampled: int
    """Number of cuts that are resampled when they are loaded."""

    samples_by: dict[str, Counter[str]]
    """Number of samples by name, under the keys `language` and `speaker`."""

    shards: list[ObjectInfo] = field(default_factory=list)
    """The shards of the cuts, in the order of first use; the shard of a record counts from the start of this list."""

    speech: SpeechTotals = field(default_factory=SpeechTotals)
    """Speech in the recordings, if it was looked for."""

    def to_bytes(self) -> bytes:
        """Returns a compressed form that `from_bytes` reads."""
        values = {
            "num_entries": self.num_entries,
            "rejects": self.rejects,
            "num_resampled": self.num_resampled,
            "samples_by": self.samples_by,
            "shards": self.shards,
            "speech": asdict(self.speech),
            "num_records": len(self.records),
            "layout": _LAYOUT,
        }
        # json, because orjson does not write file names that are not Unicode.
        return zlib.compress(json.dumps(values).encode() + b"\n" + self.records.tobytes() + self.lines, 1)

    @classmethod
    def from_bytes(cls, content: bytes) -> "ProbedItems":
        """Returns what `to_bytes` of this version of the package wrote.

        Raises:
            ValueError, KeyError, zlib.error: It is damaged.
        """
        header, _, content = zlib.decompress(content).partition(b"\n")
        values = json.loads(header)
        if values.pop("layout") != _LAYOUT:
            raise ValueError("written by another version of the package")
        num_bytes = values.pop("num_records") * _RECORD.itemsize
        return cls(
            lines=content[num_bytes:],
            records=np.frombuffer(content[:num_bytes], _RECORD),
            rejects=[Reject(*reject) for reject in values.pop("rejects")],
            samples_by={kind: Counter(counts) for kind, counts in values.pop("samples_by").items()},
            shards=[ObjectInfo(*shard) for shard in values.pop("shards")],
            speech=SpeechTotals(**values.pop("speech")),
            **values,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusStats:
    """Size and content of a corpus that was written."""

    num_cuts: int
    num_bytes: int
    """Size of `cuts.jsonl`."""

    total_samples: int
    shortest: int
    """Length of the shortest cut, in samples."""

    longest: int
    """Length of the longest cut, in samples."""

    fingerprint: str
    num_resampled: int
    """Number of cuts that are resampled when they are loaded."""

    rejected: dict[str, int] = field(default_factory=dict)
    """Number of rejects by reason, most frequent first."""

    samples_by: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of samples by name, under `language` and `speaker`. A key without names, or with more than a hundred
    thousand, is omitted."""

    shards: ShardStats | None = None
    """The shards of the corpus; None if no cut has an address."""

    speech: SpeechTotals = field(default_factory=SpeechTotals)
    """Speech in all recordings, if it was looked for."""


class _Row(NamedTuple):
    """A cut in the form in which it is written."""

    line: bytes
    digest: bytes
    """Digest of the id."""

    columns: tuple[int, ...]
    """The values of `_COLUMNS`; the offset of the line is added later."""

    is_resampled: bool
    names: tuple[Any, Any]
    """Language and speaker; None or empty if the cut has none."""


class ItemCollector:
    """Collects the cuts and rejects of consecutive items of one source into a `ProbedItems`.

    They are in the order of their numbers, whatever the order in which they were added: the members of a tar that is
    read as a stream arrive in another order than the lines of a manifest.
    """

    def __init__(self) -> None:
        self.num_entries = 0
        self._results: dict[int, list[_Row | Reject | SpeechTotals]] = {}
        self._shards: dict[ObjectInfo, int] = {}

    def begin(self, number: int | None) -> None:
        """Begins an entry. One with a number of its own replaces an earlier one with this number."""
        if number is None or self._results.pop(number, None) is None:
            self.num_entries += 1

    def add(self, cut: Cut, number: int, where: str) -> None:
        """Adds a cut; `number` is that of its entry or item, counted from 1, and `where` its position in the input.

        A cut that cannot be written as JSON, such as one whose file name is not Unicode, becomes a reject.
        """
        row, num_samples = cut.row, cut.num_samples
        try:
            line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError as error:
            detail = f"its name or a label is not Unicode: {error}"
            self.reject(Reject(where, row["id"], "unreadable", detail), number)
            return
        digest = hashlib.blake2b(row["id"].encode(), digest_size=8).digest()
        channel = MIXED_CHANNEL if is_mixed(row) else row["channel"]
        columns = (num_samples, 0, round(row["start"] * 1e6), channel, number, *self._address(cut))
        label = row["supervisions"][0] if row["supervisions"] else {}
        names = label.get("language"), label.get("speaker")
        result = _Row(line, digest, columns, "transforms" in row["recording"], names)
        self._results.setdefault(number, []).append(result)

    def reject(self, reject: Reject, number: int) -> None:
        """Adds a reject; `number` is that of its entry or item, counted from 1."""
        self._results.setdefault(number, []).append(reject)

    def add_totals(self, totals: SpeechTotals, number: int) -> None:
        """Adds the speech of a recording; `number` is that of its entry or item, counted from 1."""
        self._results.setdefault(number, []).append(totals)

    def collected(self) -> ProbedItems:
        """Returns all cuts and rejects that were added."""
        results = list(chain.from_iterable(found for _, found in sorted(self._results.items())))
        rows = [result for result in results if isinstance(result, _Row)]
        samples_by: dict[str, Counter[str]] = {"language": Counter(), "speaker": Counter()}
        for row in rows:
            for counter, name in zip(samples_by.values(), row.names, strict=True):
                if name:
                    counter[name] += row.columns[0]
        return ProbedItems(
            num_entries=self.num_entries,
            lines=b"".join(row.line for row in rows),
            records=_records_of(rows),
            rejects=[result for result in results if isinstance(result, Reject)],
            num_resampled=sum(row.is_resampled for row in rows),
            samples_by=samples_by,
            shards=[*self._shards],
            speech=SpeechTotals.sum(result for result in results if isinstance(result, SpeechTotals)),
        )

    def _address(self, cut: Cut) -> tuple[int, int, int, int]:
        """Returns the values of the last columns of a cut: begin, extent, crc32, has_crc32."""
        member = cut.member
        if member is None:
            return 0, NO_SHARD << 32, 0, 1
        number = self._shards.setdefault(member.shard, len(self._shards))
        return member.offset, number << 32 | member.length, member.crc32 or 0, member.crc32 is not None


def _records_of(rows: list[_Row]) -> NDArray[Any]:
    records = np.zeros(len(rows), _RECORD)
    if rows:
        for name, values in zip(_COLUMNS, zip(*(row.columns for row in rows), strict=True), strict=True):
            records[name] = values
        records["id"] = np.frombuffer(b"".join(row.digest for row in rows), "<u8")
        records["offset"][1:] = np.cumsum([len(row.line) for row in rows[:-1]])
    return records


class CorpusWriter:
    """Writes `cuts.jsonl`, `rejected.jsonl`, `index.npy` and the files of addresses of one corpus."""

    def __init__(self, directory: Path) -> None:
        self.num_entries = 0
        self.rejected: Counter[str] = Counter()
        self.first_reject: Reject | None = None
        self._directory = directory
        self._files = ExitStack()
        self._files.callback((directory / "records.tmp").unlink, missing_ok=True)
        self._cuts = self._files.enter_context((directory / "cuts.jsonl").open("w+b"))
        # File names may hold bytes that are not Unicode; they are written as escapes.
        self._rejected = self._files.enter_context(
            (directory / "rejected.jsonl").open("w", encoding="utf-8", errors="backslashreplace")
        )
        self._records = self._files.enter_context((directory / "records.tmp").open("w+b"))
        self._shards = self._files.enter_context(ShardWriter(directory))
        self._num_bytes = 0
        self._num_resampled = 0
        self._all_checksums = True
        self._speech = SpeechTotals()
        self._samples_by: dict[str, Counter[str]] = {"language": Counter(), "speaker": Counter()}

    def add(self, probed: ProbedItems, source_index: int) -> None:
        """Appends the cuts and rejects of the next items of a source; does not modify `probed`."""
        records = probed.records.copy()
        records["offset"] += self._num_bytes
        records["source"] = source_index
        self._shards.add(probed.shards, records["extent"])
        self._all_checksums &= bool(records["has_crc32"].all())
        self._cuts.write(probed.lines)
        self._records.write(records.tobytes())
        self._num_bytes += len(probed.lines)
        self.num_entries += probed.num_entries
        self._num_resampled += probed.num_resampled
        self._speech = SpeechTotals.sum([self._speech, probed.speech])
        for kind, counter in probed.samples_by.items():
            if len(self._samples_by[kind]) <= _MAX_NAMES:
                self._samples_by[kind].update(counter)
        self._reject(probed.rejects)

    def finish(self, sources: Sequence[_Source], sampling_rate: int) -> CorpusStats | None:
        """Rejects cuts that repeat the id of an earlier cut, sorts the rest by length, and writes the index.

        Args:
            sources: The sources by index, which name the positions of repeated ids.
            sampling_rate: Rate of the corpus in Hz, which is part of the fingerprint.

        Returns:
            The statistics of the corpus, or None if there is no cut and thus no index.

        Raises:
            ManifestError: A cut is so long that its length and index do not fit into a sort key of 63 bits.
        """
        for file in (self._cuts, self._records):
            file.flush()
        if not self._num_bytes:
            return None
        records = _Records(self._records.fileno())
        if len(repeated := self._repeated(records)):
            self._remove(records, repeated, sources)
        for index, source in enumerate(sources):
            if isinstance(source, PackedShar):
                records.sort_by_number(index)
        lengths = self._write_index(records)
        extents = (block["extent"] for _, block in records.blocks())
        shards = self._shards.finish(extents, has_checksums=self._all_checksums)
        return CorpusStats(
            num_cuts=len(records),
            num_bytes=self._num_bytes,
            total_samples=int(lengths.sum()),
            shortest=int(lengths[0]),
            longest=int(lengths[-1]),
            fingerprint=_fingerprint(records, sampling_rate),
            num_resampled=self._num_resampled,
            rejected=dict(self.rejected.most_common()),
            samples_by={k: v for k, v in self._samples_by.items() if 0 < len(v) <= _MAX_NAMES},
            shards=shards,
            speech=self._speech,
        )

    def close(self) -> None:
        """Closes all files and removes the temporary one, even if flushing fails because the disk is full."""
        self._files.close()

    def _reject(self, rejects: Iterable[Reject]) -> None:
        for reject in rejects:
            self.first_reject = self.first_reject or reject
            self.rejected[reject.reason] += 1
            self._rejected.write(json.dumps(reject._asdict(), ensure_ascii=False) + "\n")

    def _repeated(self, records: "_Records") -> "array[int]":
        """Returns the indices of cuts that repeat the id of an earlier cut, ascending."""
        repeated, repeated_digests = array("q"), _repeated_values(records.column("id"))
        first_with_digest = np.full(len(repeated_digests), -1)
        colliding: set[str] = set()  # ids that share their digest with a different, earlier id
        for start, block in records.blocks() if len(repeated_digests) else ():
            positions = np.searchsorted(repeated_digests, block["id"])
            positions[positions == len(repeated_digests)] = 0
            for i in np.flatnonzero(repeated_digests[positions] == block["id"]).tolist():
                index, position = start + i, positions[i]
                first = int(first_with_digest[position])
                if first < 0:
                    first_with_digest[position] = index
                    continue
                cut_id = self._cut_at(records[index])["id"]
                if cut_id == self._cut_at(records[first])["id"] or cut_id in colliding:
                    repeated.append(index)
                else:
                    colliding.add(cut_id)
        return repeated

    def _remove(self, records: "_Records", repeated: "array[int]", sources: Sequence[_Source]) -> None:
        """Rejects repeated cuts, and moves the lines and records after them forward, in place."""
        for index in repeated:
            self._reject_repeated(records[index], sources)
        index_to, byte_to = repeated[0], int(records[repeated[0]]["offset"])
        for index, stop in pairwise(chain(repeated, [len(records)])):
            first = index + 1
            if first < stop:
                begin = int(records[first]["offset"])
                end = int(records[stop]["offset"]) if stop < len(records) else self._num_bytes
                self._move_bytes(begin, end, byte_to)
                records.move(first, stop, index_to, byte_to - begin)
                index_to, byte_to = index_to + stop - first, byte_to + end - begin
        records.truncate(index_to)
        self._cuts.truncate(byte_to)
        self._num_bytes = byte_to

    def _reject_repeated(self, record: np.void, sources: Sequence[_Source]) -> None:
        cut = self._cut_at(record)
        detail = f"an earlier cut has the id {cut['id']!r}"
        where = sources[int(record["source"])].where(int(record["number"]))
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
        """Writes the index, sorted by length, with cuts of the same length in input order.

        Returns:
            The lengths in samples, ascending, shape (num_cuts,).
        """
        keys = records.column("num_samples")
        bits = len(keys).bit_length()
        if int(keys.max()).bit_length() + bits > 63:
            raise ManifestError(
                f"a cut of {int(keys.max())} samples is too long to be sorted. Divide it with --window-seconds."
            )
        # Length and index share one number, so that the sort is in place and takes 8 bytes per cut.
        keys <<= bits
        for start in range(0, len(keys), _BLOCK):
            block = keys[start : start + _BLOCK]
            block |= np.arange(start, start + len(block))
        keys.sort()
        mask = (1 << bits) - 1
        # One column at a time, so that 8 bytes per cut are added to those of the keys.
        with self._array_file("index.npy", "<i8", (2, len(keys))) as file:
            for start in range(0, len(keys), _BLOCK):
                file.write((keys[start : start + _BLOCK] >> bits).tobytes())
            records.write_sorted(file, "offset", keys, mask)
        if self._shards.num_shards:
            self._write_addresses(records, keys, mask)
        keys >>= bits
        return keys

    def _write_addresses(self, records: "_Records", keys: NDArray[np.int64], mask: int) -> None:
        """Writes addresses and checksums, sorted as the index is."""
        with self._array_file("addresses.npy", "<i8", (2, len(keys))) as file:
            records.write_sorted(file, "begin", keys, mask)
            records.write_sorted(file, "extent", keys, mask)
        if self._all_checksums:
            with self._array_file("checksums.npy", "<u4", (len(keys),)) as file:
                records.write_sorted(file, "crc32", keys, mask)

    @contextmanager
    def _array_file(self, name: str, descr: str, shape: tuple[int, ...]) -> Iterator[BufferedIOBase]:
        """Opens a file to which the elements of an array are written in order."""
        # Not through a memory map: writing to one on a full disk kills the process.
        with (self._directory / name).open("wb") as file:
            header = {"descr": descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            yield file


class _Records:
    """The file of records, memory-mapped, with at most one block resident."""

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, 0)
        self._array = np.frombuffer(self._map, _RECORD)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int) -> np.void:
        record: np.void = self._array[index]
        return record

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields blocks of records, each with the index of its first record."""
        for start in range(0, len(self), _BLOCK):
            yield start, self._array[start : start + _BLOCK]
            self._map.madvise(mmap.MADV_DONTNEED)

    def column(self, name: str) -> NDArray[Any]:
        """Returns a copy of one field, at most 8 bytes per record, shape (num_records,)."""
        values = np.empty(len(self), _RECORD[name])
        for start, block in self.blocks():
            values[start : start + len(block)] = block[name]
        return values

    def write_sorted(self, file: BufferedIOBase, name: str, keys: NDArray[np.int64], mask: int) -> None:
        """Writes one field, in the order of the indices in the bits of `keys` that `mask` selects."""
        values = self.column(name)
        for start in range(0, len(keys), _BLOCK):
            file.write(values[keys[start : start + _BLOCK] & mask].tobytes())

    def move(self, first: int, stop: int, to: int, num_bytes: int) -> None:
        """Moves the records [first, stop) forward to index `to`, and shifts their line offsets by `num_bytes`."""
        for start in range(first, stop, _BLOCK):  # ascending, so that no block overwrites the next one
            block = self._array[start : min(start + _BLOCK, stop)].copy()
            block["offset"] += num_bytes
            self._array[to : to + len(block)] = block
            to += len(block)

    def sort_by_number(self, source: int) -> None:
        """Sorts the records of one source by the numbers of their items, in 16 bytes of memory per record."""
        first, stop = np.searchsorted(self._array["source"], [source, source + 1]).tolist()
        order = np.argsort(self._array["number"][first:stop], kind="stable")
        for name in _RECORD.names or ():
            values = self._array[name][first:stop].copy()
            for start in range(0, len(order), _BLOCK):
                block = order[start : start + _BLOCK]
                self._array[name][first + start : first + start + len(block)] = values[block]

    def truncate(self, num_records: int) -> None:
        """Drops all records from index `num_records` on."""
        self._array = self._array[:num_records]


def _fingerprint(records: _Records, sampling_rate: int) -> str:
    content = hashlib.blake2b(str(sampling_rate).encode(), digest_size=16)
    for _, block in records.blocks():
        for name in ("id", "start_us", "channel", "num_samples"):
            content.update(block[name].tobytes())
    return content.hexdigest()


def _repeated_values(values: NDArray[Any]) -> NDArray[Any]:
    """Returns the values that occur more than once in an array, ascending, each one once; sorts the array in place."""
    values.sort()
    is_repeated = values[1:] == values[:-1]
    is_repeated[1:] &= ~is_repeated[:-1]
    repeated: NDArray[Any] = values[1:][is_repeated]
    return repeated
