"""The result of one task: cuts, rejects and notes, as they are sent to the corpus writer and kept on disk.

Results that take long are kept until the corpus is complete, so that a run that was ended goes on where it stopped:
those of audio in shards or at URLs, and of audio that was decoded or searched for speech. Headers of other files are
read again.
"""

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.audio.channels import is_mixed
from nestdata.corpus.addresses import NO_SHARD
from nestdata.corpus.file_version import path_of
from nestdata.corpus.meta import FORMAT_VERSION
from nestdata.errors import StorageError, shortened
from nestdata.output import package_version, path_before_move
from nestdata.prepare.inputs.entry import Entry, Member, ReadsFiles, RejectReason, Source, Unusable
from nestdata.prepare.inputs.remote import in_parallel
from nestdata.prepare.inputs.rows import Meaning
from nestdata.prepare.prepare_config import PrepareConfig
from nestdata.prepare.speech import detector_name
from nestdata.redaction import redacted
from nestdata.storage import FileVersion, ObjectInfo, is_url, storage

RECORD = np.dtype(
    [
        ("num_samples", "<i8"),
        ("line_bytes", "<u4"),  # length of the line in cuts.jsonl
        ("id", "<u8"),  # digest of the cut id
        ("entry", "<u8"),  # digest of the entry id, which equals the cut id unless the entry was divided
        ("start_us", "<i8"),
        ("channel", "<i4"),
        ("file_rate", "<i4"),  # sampling rate of the file in Hz
        ("source", "<i4"),  # index of the source
        ("number", "<i8"),  # of the item in its source, counted from 1
        ("shard", "<u4"),  # `NO_SHARD` without an address
        ("offset", "<i8"),  # first byte of the audio in its shard
        ("length", "<u4"),  # bytes of the audio in its shard
        ("crc32", "<u4"),  # of these bytes
        ("has_crc32", "?"),  # whether it is known; true without an address
        ("mtime_ns", "<i8"),  # version of the file of a cut without an address; zeros if it was not opened
        ("size", "<u4"),
        ("content", "<u8"),  # digest of the bytes of the file; 0 if they were not read
        ("file", "<u8"),  # digest of the location of the file, if `content` is known
    ]
)
"""What the corpus writer keeps of a cut in memory, about 100 bytes."""

NOTES = {
    "first_channel": "entries of which only the first channel is used (--channel takes another one, or mix)",
    "shortened": "entries with text that end with the duration in the manifest, before their file",
    "clip": "files that are as long as their span in a longer recording, and are used whole",
    "ends_early": "files that are cut off behind their headers",
    "damaged": "files that are damaged",
    "no_end_mark": "Ogg files without an end mark, cut off or recorded from a stream",
    "copy": "files byte-equal to another one",
}
"""The kinds of notes, and what the summary calls them."""

MIXED_CHANNEL = -1
"""Channel of a mixed cut (the average of all channels) in its record and in the fingerprint."""

KEPT_RESULTS = "tasks"
"""Subfolder of the corpus directory while it is being written."""

# Characters of the id and the explanation of a reject.
_MAX_TEXT = 2000
# Names of columns and keys that are kept, and their characters.
_MAX_NAMES, _MAX_NAME = 200, 80


class Reject(NamedTuple):
    """An entry, or a part of one, that is not taken into the corpus."""

    where: str
    """Position in the input, such as `speech.json:12`."""

    cut_id: str
    reason: RejectReason
    detail: str
    """An explanation that gives the values found."""

    def shown(self) -> "Reject":
        """Returns the reject as it may be written: without secrets, and with long texts shortened."""
        where, cut_id, detail = redacted(self.where), redacted(self.cut_id), redacted(self.detail)
        return Reject(where, shortened(cut_id, _MAX_TEXT), self.reason, shortened(detail, _MAX_TEXT))


class Note(NamedTuple):
    """A warning about an entry that is used."""

    kind: str
    """A key of `NOTES`."""

    where: str
    """Position in the input, such as `speech.json:12`."""

    detail: str
    """The file, and the values found."""

    def shown(self) -> "Note":
        """Returns the note as it may be written: without secrets, and with a long name shortened."""
        return Note(self.kind, redacted(self.where), shortened(redacted(self.detail), _MAX_TEXT))


class Cut(NamedTuple):
    """A cut as it is written to the corpus."""

    row: dict[str, Any]
    """The dict that Lhotse's `MonoCut.to_dict` would return."""

    num_samples: int
    """Length in samples at the rate of the corpus."""

    file_rate: int
    """Sampling rate of its file in Hz."""

    member: Member | None = None
    """Address of its audio in a shard; None if the row names the file."""

    version: FileVersion | None = None
    """The version of the file that the row names, if it was opened."""

    content: int = 0
    """Digest of the bytes of its file; 0 if they were not read."""

    entry_id: str = ""
    """Id of its entry, if that was divided."""


class Searched(NamedTuple):
    """How much of a recording was searched for speech, in seconds."""

    seconds: float = 0.0
    speech: float = 0.0


Outcome = Cut | Reject | Searched | Note


@dataclass(kw_only=True, slots=True)
class Found:
    """What a task found in consecutive items of one source."""

    num_entries: int
    """Number of entries among the items; blank lines do not count."""

    lines: bytes = b""
    """The cuts as lines of `cuts.jsonl`."""

    records: NDArray[Any]
    """One record per cut, shape (num_cuts,), dtype `RECORD`."""

    rejects: list[Reject] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    samples_by_language: Counter[str]

    shards: list[ObjectInfo] = field(default_factory=list)
    """The shards of the cuts, in the order of first use; the shard of a record counts from the start of this list."""

    searched: Searched

    read_as: dict[str, list[str]] = field(default_factory=dict)
    """Names of columns and keys by what they were read as; see `Meaning.read_as`."""

    def hours(self, sampling_rate: int) -> float:
        """Returns the hours of the cuts or, if speech was looked for, of the recordings that were searched."""
        return (self.searched.seconds or int(self.records["num_samples"].sum()) / sampling_rate) / 3600

    def to_bytes(self) -> bytes:
        """Returns a compressed form that `from_bytes` reads."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("lines", "records")}
        # json, because orjson does not write file names that are not Unicode.
        header = json.dumps(values | {"num_records": len(self.records)}).encode()
        return zlib.compress(header + b"\n" + self.records.tobytes() + self.lines, 1)

    @classmethod
    def from_bytes(cls, content: bytes) -> "Found":
        """Reads what `to_bytes` of the same version of the package wrote.

        Raises:
            ValueError, KeyError, zlib.error: It is damaged.
        """
        header, _, content = zlib.decompress(content).partition(b"\n")
        values = json.loads(header)
        num_bytes = values.pop("num_records") * RECORD.itemsize
        return cls(
            lines=content[num_bytes:],
            records=np.frombuffer(content[:num_bytes], RECORD),
            rejects=[Reject(*reject) for reject in values.pop("rejects")],
            notes=[Note(*note) for note in values.pop("notes")],
            samples_by_language=Counter(values.pop("samples_by_language")),
            shards=[ObjectInfo(*shard) for shard in values.pop("shards")],
            searched=Searched(*values.pop("searched")),
            **values,
        )


def merged_names(found: Iterable[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    """Joins several `read_as` to one, which has each name once, and no more names than a person reads."""
    merged: dict[str, dict[str, None]] = {}
    for names_by in found:
        for what, names in names_by.items():
            known = merged.setdefault(what, {})
            for name in names:
                if len(known) < _MAX_NAMES:
                    known[shortened(name, _MAX_NAME)] = None
    return {what: [*names] for what, names in merged.items()}


class _Row(NamedTuple):
    """A cut that was added, without its dict and its bytes."""

    line: bytes
    record: tuple[Any, ...]
    """The values of its `RECORD`, without the index of its source and the number of its shard."""

    shard: ObjectInfo | None
    language: str | None


class Collector:
    """Collects the outcomes of the entries of a task, in the order of their numbers.

    The members of a tar that is read as a stream arrive in another order than the lines of a manifest.
    """

    def __init__(self) -> None:
        self.audio: dict[str, ObjectInfo | None] = {}
        """Locations of the audio of all entries, also of rejected ones, with size and ETag of shards and objects."""

        self._num_entries = 0
        self._meanings: dict[int, Meaning] = {}
        self._found: dict[int, list[_Row | Reject | Searched | Note]] = {}

    def add(self, outcomes: Iterable[Outcome], number: int, entry: Entry) -> None:
        """Adds the outcomes of an entry.

        Args:
            outcomes: Its cuts, rejects, notes and speech.
            number: The number of the entry or of its item, counted from 1. An entry with a number of its own replaces
                an earlier one with this number.
            entry: The entry.
        """
        replaces, where = entry.number is not None, entry.where
        audio = entry.audio.audio if isinstance(entry.audio, Unusable) else entry.audio
        if audio and (location := audio.location):
            self.audio[location] = audio.member.shard if audio.member else None
        if entry.meaning:
            self._meanings[id(entry.meaning)] = entry.meaning
        found = self._found.get(number)
        self._num_entries += found is None or not replaces
        if found is None or replaces:
            found = self._found[number] = []
        for outcome in outcomes:
            if isinstance(outcome, Cut):
                found.append(_row_of(outcome, number, where))
            else:
                found.append(outcome if isinstance(outcome, Searched) else outcome.shown())

    def collected(self) -> Found:
        """Returns all that was added."""
        ordered = [outcome for _, found in sorted(self._found.items()) for outcome in found]
        rows = [outcome for outcome in ordered if isinstance(outcome, _Row)]
        searched = [outcome for outcome in ordered if isinstance(outcome, Searched)]
        records = np.array([row.record for row in rows], RECORD)
        shards: dict[ObjectInfo, int] = {}
        samples_by_language: Counter[str] = Counter()
        for index, row in enumerate(rows):
            if row.shard:
                records["shard"][index] = shards.setdefault(row.shard, len(shards))
            if row.language:
                samples_by_language[row.language] += row.record[0]
        return Found(
            num_entries=self._num_entries,
            lines=b"".join([row.line for row in rows]),
            records=records,
            rejects=[outcome for outcome in ordered if isinstance(outcome, Reject)],
            notes=[outcome for outcome in ordered if isinstance(outcome, Note)],
            samples_by_language=samples_by_language,
            shards=[*shards],
            searched=Searched(*map(sum, zip(*searched, strict=True))),
            read_as=merged_names(meaning.read_as() for meaning in self._meanings.values()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Consecutive items of a source."""

    number: int
    """Number of the task in the run."""

    source: Source
    source_index: int
    first: int
    """Number of the first item, counted from 1."""

    items: list[Any]
    config: PrepareConfig
    moved: tuple[str, str]
    """Paths of the corpus directory once it is in place, and now."""


class KeptResult:
    """The file with the result of a task, whose name is the number of the task.

    It begins with one digest of all that the result depends on: the package, the settings, the source and its items,
    and size and time or ETag of every file and object that the task read or rejected. The names of these files and
    objects follow, so that the next run can compute the digest again. It takes the result if the digest is the same, so
    a changed shard only repeats the tasks that read it.

    Create it before the task reads anything: files may change meanwhile.
    """

    def __init__(self, task: Task) -> None:
        source = task.source
        self._task, self._path = task, Path(task.moved[1], KEPT_RESULTS, str(task.number))
        self._infos = {item.location: item for item in task.items if isinstance(item, ObjectInfo)}
        files = [file for item in task.items for file in source.files(item)] if isinstance(source, ReadsFiles) else []
        # Another version of the package may find something else in the same audio.
        versions = [package_version(), FORMAT_VERSION, detector_name() if task.config.finds_speech else ""]
        # These settings change no result of a task.
        config = replace(task.config, format=None, tars=(), strict=False, pcm=False, report_samples=0)
        self._inputs = versions, config, source, task.first, task.items, self._versions(files)

    def load(self) -> Found | None:
        """Returns the kept result; None if there is none, or if anything that it depends on has changed."""
        try:
            header, _, content = self._path.read_bytes().partition(b"\n")
            digest, *audio = json.loads(header)
            found = Found.from_bytes(content)
        except (OSError, ValueError, KeyError, TypeError, zlib.error):
            return None
        return found if digest == self._digest(audio) else None

    def save(self, found: Found, audio: Mapping[str, ObjectInfo | None]) -> None:
        """Keeps a result.

        Args:
            found: The result.
            audio: Locations of the audio of all entries, with size and ETag of shards and objects.

        Raises:
            OSError: The disk is full.
        """
        # If all files of a task are rejected, nothing is kept, and they are decoded again.
        has_decoded = self._task.config.probe == "decode" and len(found.records) > 0
        takes_long = found.shards or found.searched.seconds or has_decoded
        # A worker of Dask may have no access to the directory.
        if not (takes_long and self._path.parent.is_dir()):
            return
        self._infos |= {location: info for location, info in audio.items() if info}
        header = json.dumps([self._digest([*audio]), *audio]).encode()
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")  # the caller of all tasks removes what is left
        temporary.write_bytes(header + b"\n" + found.to_bytes())
        temporary.replace(self._path)

    def _digest(self, audio: Sequence[str]) -> str:
        depends_on = repr((self._inputs, self._versions(audio))).encode(errors="surrogateescape")
        return blake2b(depends_on, digest_size=20).hexdigest()

    def _versions(self, locations: Sequence[str]) -> list[tuple[str, int, Any] | None]:
        """Returns size and time or ETag of each location; None for one that cannot be read."""

        def version(location: str) -> tuple[str, int, Any] | None:
            try:
                if is_url(location):
                    info = self._infos.get(location) or storage().info(location)
                    return location, info.size, info.etag
                status = os.stat(path_before_move(location, *self._task.moved))
                return location, status.st_size, status.st_mtime_ns
            except (OSError, ValueError, StorageError):  # ValueError: the path holds a null character
                return None

        return [*in_parallel(version, locations, is_slow=lambda name: is_url(name) and name not in self._infos)]


def _row_of(cut: Cut, number: int, where: str) -> _Row | Reject:
    """Returns a cut as a row.

    One that cannot be written as JSON becomes a reject: its file name is not Unicode, a label is nested deeper than 254
    levels, or an integer in a label has more than 64 bits.
    """
    row, num_samples, file_rate, member, version, content, entry_id = cut
    try:
        line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        problem = "its name or a label is not Unicode, nested too deep or too large a number"
        detail = f"{problem} ({error}); correct it in the input, such as by writing a manifest as UTF-8"
        return Reject(where, row["id"], "unreadable", detail).shown()
    label = row["supervisions"][0] if row["supervisions"] else {}
    id_digest = digest(row["id"])
    offset, length, crc32 = (member.offset, member.length, member.crc32) if member else (0, 0, 0)
    record = (
        num_samples,
        len(line),
        id_digest,
        digest(entry_id) if entry_id not in ("", row["id"]) else id_digest,
        round(row["start"] * 1e6),
        MIXED_CHANNEL if "custom" in row and is_mixed(row) else row["channel"],
        file_rate,
        0,
        number,
        NO_SHARD,
        offset,
        length,
        crc32 or 0,
        crc32 is not None,
        *(version or (0, 0)),
        content,
        digest(f"{member.location}\0{offset}" if member else path_of(row)) if content else 0,
    )
    return _Row(line, record, member.shard if member else None, label.get("language"))


def digest(text: str) -> int:
    """Returns 64 bits of a digest, by which a record refers to an id or a location."""
    return int.from_bytes(blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), "little")
