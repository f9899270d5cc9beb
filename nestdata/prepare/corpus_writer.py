"""Writes the files of a corpus: cuts, rejects, notes, index and addresses.

Cuts are added in order. Each one adds a line to `cuts.jsonl` and a record of about 100 bytes in memory. Once all cuts
are there, `CorpusWriter.finish` gives entries with the same id different ids, or removes the later ones, and sorts the
cuts by length.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.columns import Column
from nestdata.corpus.addresses import ADDRESS, NO_SHARD, relative_name
from nestdata.corpus.file_version import VERSION
from nestdata.errors import ManifestError, shortened
from nestdata.prepare.distinct_ids import audio_of, entry_id, renamed, tell_apart
from nestdata.prepare.found import RECORD, Found, Note, Reject, Searched, digest, merged_names
from nestdata.prepare.inputs.entry import Source
from nestdata.storage import ObjectInfo, common_folder, is_url, parent

# Hours are not counted by language if there are more names than this: the counts would not fit a report.
_MAX_NAMES = 100_000
# Characters of an id in a reject, and in an explanation.
_MAX_ID, _MAX_ID_IN_TEXT = 2000, 200
# Records whose columns are hashed at a time. Fingerprints depend on it.
_BLOCK = 1 << 20


@dataclass(kw_only=True, slots=True)
class CorpusStats:
    """Content and size of a corpus that is being written; `CorpusWriter.finish` sets the size."""

    rejected: Counter[str] = field(default_factory=Counter)
    """Number of rejects by reason."""

    notes: Counter[str] = field(default_factory=Counter)
    """Number of notes by kind."""

    first_notes: dict[str, Note] = field(default_factory=dict)
    """The first note of each kind."""

    read_as: dict[int, dict[str, list[str]]] = field(default_factory=dict)
    """For each source, by index: the names of columns and keys by what they were read as."""

    searched: Searched = field(default_factory=Searched)
    """Speech in all recordings, if it was looked for."""

    samples_by_language: Counter[str] = field(default_factory=Counter)
    """Empty without names, or with more than a hundred thousand."""

    num_cuts: int = 0
    num_bytes: int = 0
    """Size of `cuts.jsonl`."""

    lengths: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Lengths in samples, ascending, shape (num_cuts,)."""

    fingerprint: str = ""
    num_resampled: int = 0
    """Number of cuts that are resampled when they are loaded."""

    samples_by_rate: Counter[str] = field(default_factory=Counter)
    """Number of samples by the sampling rate of the file, such as `16000 Hz`."""

    shards: dict[str, Any] | None = None
    """What `meta.json` says of the shards; None if no cut has an address.

    The names of shards are relative to the root, the deepest folder that holds all shards; empty if there is none."""


class CorpusWriter:
    """Writes `cuts.jsonl`, `rejected.jsonl`, `index.npy`, the files of addresses and, if needed, `notes.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self.num_entries = 0
        self.first_reject: Reject | None = None
        self.stats = CorpusStats()
        self._directory = directory
        self._files = ExitStack()
        self._cuts = self._files.enter_context((directory / "cuts.jsonl").open("w+b"))
        # File names may hold bytes that are not Unicode; they are written as escapes.
        self._rejected = self._files.enter_context(
            (directory / "rejected.jsonl").open("w", encoding="utf-8", errors="backslashreplace")
        )
        self._records = bytearray()
        self._shards: dict[ObjectInfo, int] = {}

    def add(self, found: Found, source_index: int) -> None:
        """Appends the cuts and rejects of the next items of a source; does not modify `found`."""
        stats, records = self.stats, found.records.copy()
        records["source"] = source_index
        if found.shards:
            numbers = [self._shards.setdefault(shard, len(self._shards)) for shard in found.shards]
            has_shard = records["shard"] != NO_SHARD
            records["shard"][has_shard] = np.array(numbers)[records["shard"][has_shard]]
        self._cuts.write(found.lines)
        self._records += records.tobytes()
        self.num_entries += found.num_entries
        stats.num_bytes += len(found.lines)
        stats.searched = Searched(*map(sum, zip(stats.searched, found.searched, strict=True)))
        if len(stats.samples_by_language) <= _MAX_NAMES:
            stats.samples_by_language.update(found.samples_by_language)
        if found.read_as:
            stats.read_as[source_index] = merged_names([stats.read_as.get(source_index, {}), found.read_as])
        self._reject(found.rejects)
        self._note(found.notes)

    def check_names(self, columns: Iterable[Column]) -> None:
        """Raises ManifestError if no row has a column that the caller names."""
        roles = {role for read_as in self.stats.read_as.values() for role in read_as}
        missing = next((column for column in columns if column.name and column.role not in roles), None)
        if missing:
            raise ManifestError(
                f"--columns: no row of the inputs has {missing.name[:80]!r}, which it names as {missing.role}. Check "
                "the name; formats without columns or keys, such as folders, have none."
            )

    def finish(self, sources: Sequence[Source], sampling_rate: int) -> CorpusStats | None:
        """Gives entries with an id that was used before another id, or rejects them; then writes the index by length.

        Args:
            sources: The sources by index, which name the positions of repeated ids.
            sampling_rate: Rate of the corpus in Hz, which is part of the fingerprint.

        Returns:
            The statistics of the corpus, or None if there is no cut and thus no index.
        """
        stats = self.stats
        self._cuts.flush()
        if not stats.num_bytes:
            return None
        records = np.frombuffer(self._records, RECORD)
        self._offsets = _offsets_of(records)
        if repeated := _repeated(records):
            new_ids, same_as = tell_apart(records, repeated, self._cut_at, sources)
            for index, earlier in sorted(same_as.items()):
                self._reject_repeated(records, index, earlier, sources)
            records = self._rewritten(records, new_ids, [*same_as])
        self._note(self._copies(records))
        stats.num_cuts = len(records)
        stats.lengths, stats.shards = self._write_index(records)
        stats.fingerprint = _fingerprint(records, sampling_rate)
        stats.num_resampled = int((records["file_rate"] != sampling_rate).sum())
        rates, samples = records["file_rate"], records["num_samples"]
        stats.samples_by_rate = Counter({f"{rate} Hz": int(samples[rates == rate].sum()) for rate in np.unique(rates)})
        languages = +stats.samples_by_language
        stats.samples_by_language = Counter() if len(languages) > _MAX_NAMES else languages
        return stats

    def copy_rejects(self, path: Path) -> None:
        """Copies `rejected.jsonl`, for a corpus that is not written."""
        self._rejected.flush()
        shutil.copyfile(self._directory / "rejected.jsonl", path)

    def close(self) -> None:
        """Closes all files, even if flushing fails because the disk is full."""
        self._files.close()

    def _reject(self, rejects: Iterable[Reject]) -> None:
        for reject in rejects:
            self.first_reject = self.first_reject or reject
            self.stats.rejected[reject.reason] += 1
            self._rejected.write(json.dumps(reject._asdict(), ensure_ascii=False) + "\n")

    def _note(self, notes: Sequence[Note]) -> None:
        if not notes:
            return
        with (self._directory / "notes.jsonl").open("a", encoding="utf-8", errors="backslashreplace") as file:
            for note in notes:
                self.stats.notes[note.kind] += 1
                self.stats.first_notes.setdefault(note.kind, note)
                file.write(json.dumps(note._asdict(), ensure_ascii=False) + "\n")

    def _reject_repeated(self, records: NDArray[Any], index: int, earlier: int, sources: Sequence[Source]) -> None:
        record, first, cut = records[index], records[earlier], self._cut_at(index)
        repeated, cut_id = shortened(entry_id(cut, record), _MAX_ID_IN_TEXT), shortened(cut["id"], _MAX_ID)
        where, taken_at = (sources[int(one["source"])].where(int(one["number"])) for one in (record, first))
        other = self._cut_at(earlier)
        audio, taken_by = audio_of(cut), audio_of(other)
        detail = f"{audio}: the id {repeated!r} is taken by {taken_by}{taken_at and f' ({taken_at})'}"
        if audio == taken_by and (names := _different_labels(cut, other)):
            found = shortened(", ".join(names), _MAX_ID_IN_TEXT)
            detail += f"; they differ in {found}: if one of these is a time or a channel, say so by --columns"
        self._reject([Reject(where or audio, cut_id, "duplicate_id", detail).shown()])
        if language := (cut["supervisions"] or [{}])[0].get("language"):
            self.stats.samples_by_language[language] -= int(record["num_samples"])

    def _rewritten(
        self, records: NDArray[Any], new_ids: Mapping[int, tuple[str, str]], removed: list[int]
    ) -> NDArray[Any]:
        """Removes cuts from `cuts.jsonl` and gives others new ids; returns the records of those that are there."""
        records, is_kept = records.copy(), np.ones(len(records), np.bool_)
        is_kept[removed] = False
        self._cuts.seek(0)
        kept = self._files.enter_context((self._directory / "kept.tmp").open("w+b"))
        for index, (line, is_in) in enumerate(zip(self._cuts, is_kept.tolist(), strict=True)):
            written = line
            if index in new_ids:
                old, new = new_ids[index]
                cut = renamed(orjson.loads(line), old, new)
                written = orjson.dumps(cut, option=orjson.OPT_APPEND_NEWLINE)
                records["line_bytes"][index] = len(written)
                records["id"][index], records["entry"][index] = digest(cut["id"]), digest(new)
            if is_in:
                kept.write(written)
        kept.flush()
        (self._directory / "kept.tmp").replace(self._directory / "cuts.jsonl")
        records = records[is_kept]
        self._cuts, self.stats.num_bytes = kept, int(records["line_bytes"].sum(dtype=np.int64))
        self._offsets = _offsets_of(records)
        return records

    def _cut_at(self, index: int) -> dict[str, Any]:
        self._cuts.seek(int(self._offsets[index]))
        cut: dict[str, Any] = orjson.loads(self._cuts.readline())
        return cut

    def _copies(self, records: NDArray[Any]) -> list[Note]:
        """Returns a note for each file that is byte-equal to an earlier one, if digests of their bytes are known."""
        known = np.flatnonzero(records["content"])
        files = known[np.sort(np.unique(records["file"][known], return_index=True)[1])]
        files = files[np.argsort(records["content"][files], kind="stable")]
        content = records["content"][files]
        is_same = content[1:] == content[:-1]
        pairs = sorted(zip(files[:-1][is_same].tolist(), files[1:][is_same].tolist(), strict=True))
        names = ([self._file_of(records, index) for index in pair] for pair in pairs)
        return [Note("copy", copy, f"{copy}, a copy of {first}").shown() for first, copy in names]

    def _file_of(self, records: NDArray[Any], index: int) -> str:
        """Returns the path or URL of the audio of a cut, with the first byte of a member of a tar."""
        shard, offset = int(records["shard"][index]), int(records["offset"][index])
        if shard == NO_SHARD:
            return audio_of(self._cut_at(index))
        location = [*self._shards][shard].location
        return f"{location} (byte {offset})" if offset else location

    def _write_index(self, records: NDArray[Any]) -> tuple[NDArray[np.int64], dict[str, Any] | None]:
        """Writes index, addresses and versions of files, sorted by length, with cuts of one length in input order.

        Returns:
            The lengths in samples, ascending, shape (num_cuts,), and the statistics of the shards.
        """
        order = np.argsort(records["num_samples"], kind="stable")
        lengths: NDArray[np.int64] = records["num_samples"][order]
        self._write_array("index.npy", np.stack([lengths, self._offsets[order]]))
        if records["size"].any():
            self._write_columns("versions.npy", VERSION, records, order)
        if not self._shards:
            return lengths, None
        self._write_columns("addresses.npy", ADDRESS, records, order)
        has_checksums = bool(records["has_crc32"].all())
        if has_checksums:
            self._write_array("checksums.npy", records["crc32"][order])
        return lengths, self._write_shards(records["shard"], has_checksums)

    def _write_shards(self, numbers: NDArray[np.uint32], has_checksums: bool) -> dict[str, Any]:
        root = parent(next(iter(self._shards)).location)
        for shard in self._shards:
            root = common_folder(root, parent(shard.location))
        counts = np.bincount(numbers[numbers != NO_SHARD], minlength=len(self._shards)).tolist()
        starts = [0]
        with (self._directory / "shards.jsonl").open("wb") as file:
            for (location, size, etag), count in zip(self._shards, counts, strict=True):
                row = {"name": relative_name(location, root), "size": size, "etag": etag, "members": count}
                starts.append(starts[-1] + file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)))
        self._write_array("shards.npy", np.array(starts))
        has_urls = any(is_url(shard.location) for shard in self._shards)
        return {
            "num_shards": len(self._shards), "root": root, "has_urls": has_urls, "has_checksums": has_checksums,
        }  # fmt: skip

    def _write_columns(self, name: str, dtype: np.dtype[Any], records: NDArray[Any], order: NDArray[np.intp]) -> None:
        rows = np.empty(len(records), dtype)
        for column in dtype.names or ():
            rows[column] = records[column][order]
        self._write_array(name, rows)

    def _write_array(self, name: str, array: NDArray[Any]) -> None:
        # If the disk is full, the error of np.save does not say so, and a memory map kills the process.
        with (self._directory / name).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(array.data)


def _offsets_of(records: NDArray[Any]) -> NDArray[np.int64]:
    """Returns where the line of each cut begins in `cuts.jsonl`, in bytes."""
    starts: NDArray[np.int64] = np.cumsum(records["line_bytes"], dtype=np.int64) - records["line_bytes"]
    return starts


def _repeated(records: NDArray[Any]) -> dict[int, int]:
    """Returns the indices of cuts whose entry repeats an id, each with the index of the first cut with this id.

    Entries without a cut do not count: if a file cannot be used, another one with the same id replaces it.
    """
    order = np.argsort(records["entry"], kind="stable")
    entry, source, number = (records[name][order] for name in ("entry", "source", "number"))
    begins = np.append(True, entry[1:] != entry[:-1])
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    # Further windows or segments of the first entry do not repeat its id.
    is_repeated = (source != source[first]) | (number != number[first])
    return dict(zip(order[is_repeated].tolist(), order[first[is_repeated]].tolist(), strict=True))


def _different_labels(cut: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names of the custom fields in which two cuts differ."""
    first, second = (one.get("custom") or {} for one in (cut, other))
    return [name for name in first | second if first.get(name) != second.get(name)]


def _fingerprint(records: NDArray[Any], sampling_rate: int) -> str:
    """Returns a digest of ids, spans, channels and lengths of all cuts, in their order."""
    content = hashlib.blake2b(str(sampling_rate).encode(), digest_size=16)
    for start in range(0, len(records), _BLOCK):
        for name in ("id", "start_us", "channel", "num_samples"):
            content.update(records[name][start : start + _BLOCK].tobytes())
    return content.hexdigest()
