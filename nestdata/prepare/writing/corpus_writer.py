"""Writes the files of a corpus, with at most 16 bytes of memory per cut.

Cuts are added in order. Each one adds a line to `cuts.jsonl` and a record of fixed size to a temporary file. Once all
cuts are there, `CorpusWriter.finish` removes those with a repeated id and sorts the rest by length.
`records` beside this module holds the records, and `shard_writer` writes the shards of addresses.
"""

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedIOBase
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.audio.lhotse_audio import is_resampled
from nestdata.corpus.addresses import NO_SHARD
from nestdata.errors import shortened
from nestdata.prepare.speech.measures import SpeechTotals
from nestdata.prepare.writing.draw import KeyedDraw, key_of
from nestdata.prepare.writing.found import Reject, span_of_cut
from nestdata.prepare.writing.probed_items import ProbedItems
from nestdata.prepare.writing.records import LengthOrder, Records, fingerprint, repeated_values
from nestdata.prepare.writing.shard_writer import ShardStats, ShardWriter

LONG_SECONDS = 60
"""Cuts that last longer are counted: few batches have room for them, and they pad the others."""

# What is written of a reject.
_REJECT_FIELDS = ("where", "cut_id", "reason", "detail")
# Hours are not counted by language or speaker if there are more names than this: the counts would not fit a report.
_MAX_NAMES = 100_000
# Characters of an id in a reject, and in an explanation.
_MAX_ID, _MAX_ID_IN_TEXT = 2000, 200


@runtime_checkable
class _Source(Protocol):
    """The part of `nestdata.prepare.inputs.Source` that `CorpusWriter` uses."""

    def where(self, number: int) -> str: ...


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

    num_long: int
    """Number of cuts of more than `LONG_SECONDS`."""

    long_samples: int
    """Their samples."""

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

    drawn_cuts: dict[str, list[int]] = field(default_factory=dict)
    """Some cuts of each language, by the byte at which their line of `cuts.jsonl` starts."""

    drawn_rejects: KeyedDraw[Reject] = field(default_factory=KeyedDraw)
    """Some rejects of each reason, with their audio."""


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
        self._has_versions = False
        self._speech = SpeechTotals()
        self._samples_by: dict[str, Counter[str]] = {"language": Counter(), "speaker": Counter()}
        self._drawn_cuts, self._drawn_rejects = KeyedDraw[int](), KeyedDraw[Reject]()

    def add(self, probed: ProbedItems, source_index: int) -> None:
        """Appends the cuts and rejects of the next items of a source; does not modify `probed`."""
        records = probed.records.copy()
        records["offset"] += self._num_bytes
        records["source"] = source_index
        self._shards.add(probed.shards, records["extent"])
        self._all_checksums &= bool(records["has_crc32"].all())
        self._has_versions |= bool((records["extent"] != NO_SHARD << 32).any())
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
        self._drawn_cuts.merge(probed.drawn_cuts)
        self._drawn_rejects.merge(probed.drawn_rejects)

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
        records = Records(self._records.fileno())
        repeated, firsts = self._repeated(records)
        if repeated:
            self._remove(records, repeated, firsts, sources)
        lengths = self._write_index(records)
        first_long = int(np.searchsorted(lengths, LONG_SECONDS * sampling_rate, "right"))
        extents = (block["extent"] for _, block in records.blocks())
        shards = self._shards.finish(extents, has_checksums=self._all_checksums)
        return CorpusStats(
            num_cuts=len(records),
            num_bytes=self._num_bytes,
            total_samples=int(lengths.sum()),
            shortest=int(lengths[0]),
            longest=int(lengths[-1]),
            num_long=len(lengths) - first_long,
            long_samples=int(lengths[first_long:].sum()),
            fingerprint=fingerprint(records, sampling_rate),
            num_resampled=self._num_resampled,
            rejected=dict(self.rejected.most_common()),
            samples_by={k: v for k, v in self._samples_by.items() if 0 < len(v) <= _MAX_NAMES},
            shards=shards,
            speech=self._speech,
            drawn_cuts=_lines_of(self._drawn_cuts, records),
            drawn_rejects=self._drawn_rejects,
        )

    def close(self) -> None:
        """Closes all files and removes the temporary one, even if flushing fails because the disk is full."""
        self._files.close()

    def _reject(self, rejects: Iterable[Reject]) -> None:
        for reject in rejects:
            self.first_reject = self.first_reject or reject
            self.rejected[reject.reason] += 1
            row = dict(zip(_REJECT_FIELDS, reject, strict=False))
            self._rejected.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _repeated(self, records: Records) -> tuple["array[int]", "array[int]"]:
        """Returns the indices of cuts that repeat the id of an earlier cut, ascending, and those of the earlier."""
        repeated, firsts, repeated_digests = array("q"), array("q"), repeated_values(records.column("id"))
        first_with_digest = np.full(len(repeated_digests), -1)
        colliding: dict[str, int] = {}  # ids that share their digest with a different, earlier id
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
                if cut_id != self._cut_at(records[first])["id"]:
                    first = colliding.setdefault(cut_id, index)
                if first != index:
                    repeated.append(index)
                    firsts.append(first)
        return repeated, firsts

    def _remove(
        self, records: Records, repeated: "array[int]", firsts: "array[int]", sources: Sequence[_Source]
    ) -> None:
        """Rejects repeated cuts, and moves the lines and records after them forward, in place."""
        for index, first in zip(repeated, firsts, strict=True):
            self._reject_repeated(records[index], records[first], sources)
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

    def _reject_repeated(self, record: np.void, first: np.void, sources: Sequence[_Source]) -> None:
        cut = self._cut_at(record)
        cut_id = shortened(cut["id"], _MAX_ID)
        where, earlier = (sources[int(one["source"])].where(int(one["number"])) for one in (record, first))
        audio, earlier_audio = _audio_of(cut), _audio_of(self._cut_at(first))
        detail = f"{audio}: the id {shortened(cut_id, _MAX_ID_IN_TEXT)!r} is taken by {earlier_audio} ({earlier})"
        reject = Reject(where, cut_id, "duplicate_id", detail).without_secrets()
        self._reject([reject])
        self._drawn_rejects.offer("duplicate_id", key_of(where), reject._replace(audio=span_of_cut(cut)))
        label = (cut["supervisions"] or [{}])[0]
        for kind, counter in self._samples_by.items():
            if label.get(kind) in counter:
                counter[label[kind]] -= int(record["num_samples"])
        self._num_resampled -= is_resampled(cut["recording"])

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

    def _write_index(self, records: Records) -> NDArray[np.int64]:
        """Writes the index and the addresses, sorted by length, with cuts of the same length in input order.

        Returns:
            The lengths in samples, ascending, shape (num_cuts,).
        """
        order, num_cuts = LengthOrder(records), len(records)
        # One column at a time, so that 8 bytes per cut are added to those of the order.
        with self._array_file("index.npy", "<i8", (2, num_cuts)) as file:
            order.write_lengths(file)
            order.write(file, "offset")
        if self._shards.num_shards or self._has_versions:
            with self._array_file("addresses.npy", "<i8", (2, num_cuts)) as file:
                order.write(file, "begin")
                order.write(file, "extent")
            if self._shards.num_shards and self._all_checksums:
                with self._array_file("checksums.npy", "<u4", (num_cuts,)) as file:
                    order.write(file, "crc32")
        return order.lengths()

    @contextmanager
    def _array_file(self, name: str, descr: str, shape: tuple[int, ...]) -> Iterator[BufferedIOBase]:
        """Opens a file to which the elements of an array are written in order."""
        # Not through a memory map: writing to one on a full disk kills the process.
        with (self._directory / name).open("wb") as file:
            header = {"descr": descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            yield file


def _audio_of(cut: dict[str, Any]) -> str:
    """Returns the path or URL of the audio of a cut for messages."""
    sources = [source for source in cut["recording"].get("sources", ()) if cut["channel"] in source["channels"]]
    return str(sources[0].get("source", "")) if sources else "a recording without a source"


def _lines_of(drawn: KeyedDraw[int], records: Records) -> dict[str, list[int]]:
    """Returns where the lines of drawn cuts start, in the order of the draw; cuts that were removed are omitted."""
    digests = np.array(sorted({digest for group in drawn for digest in drawn[group]}), "<u8")
    starts: dict[int, int] = {}
    for _, block in records.blocks() if len(digests) else ():
        positions = np.minimum(np.searchsorted(digests, block["id"]), len(digests) - 1)
        found = block[digests[positions] == block["id"]]
        starts |= zip(found["id"].tolist(), found["offset"].tolist(), strict=True)
    return {group: [starts[digest] for digest in drawn[group] if digest in starts] for group in drawn}
