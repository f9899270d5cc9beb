"""Cuts, rejects, notes and all that one task found, in the form in which it is sent to the corpus writer and kept."""

import json
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.audio.channels import is_mixed
from nestdata.corpus.addresses import NO_SHARD
from nestdata.corpus.file_version import path_of, row_of
from nestdata.errors import shortened
from nestdata.prepare.inputs.audio import Member, RejectReason
from nestdata.redaction import redacted
from nestdata.storage import FileVersion, ObjectInfo

RECORD = np.dtype(
    [
        ("num_samples", "<i8"),
        ("offset", "<i8"),  # of the line in cuts.jsonl, in bytes
        ("id", "<u8"),  # a digest of the cut id
        ("entry", "<u8"),  # a digest of the id of its entry, which is that of a cut that is all of it
        ("start_us", "<i8"),
        ("channel", "<i4"),
        ("file_rate", "<i4"),  # sampling rate of the file in Hz
        ("source", "<i4"),  # index of the source
        ("number", "<i8"),  # of the item in its source, counted from 1
        ("begin", "<i8"),  # first byte of the audio in its shard; without an address, the time of its file in ns
        ("extent", "<u8"),  # shard << 32 | bytes of the audio or its file; `NO_SHARD` is the shard without an address
        ("crc32", "<u4"),
        ("has_crc32", "?"),
        ("content", "<u8"),  # a digest of the bytes of the file; 0 if it is not known
        ("place", "<u8"),  # a digest of where these bytes are
    ]
)
"""What the corpus writer keeps of a cut in memory."""

NoteKind = Literal["first_channel", "shortened", "no_end_mark", "copy"]

# The channel in the fingerprint of a cut that is the average of all channels.
_MIXED_CHANNEL = -1
# Characters of the id and the explanation of a reject.
_MAX_TEXT = 2000
_LAYOUT = str(RECORD.descr)


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
    """What a person should know about an entry that is used."""

    kind: NoteKind
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
    """Where its audio is, if that is not the file that the row names."""

    version: FileVersion | None = None
    """The version of the file that the row names, if it was opened."""

    content: int = 0
    """Digest of the bytes of its file; 0 if they were not read."""

    entry_id: str = ""
    """Id of its entry, if that was divided."""


class Searched(NamedTuple):
    """How much of a recording was searched for speech, in seconds."""

    seconds: float
    speech: float


Outcome = Cut | Reject | Searched | Note


@dataclass(kw_only=True, slots=True)
class Found:
    """What a task found in consecutive items of one source."""

    num_entries: int
    """Number of entries among the items; blank lines do not count."""

    lines: bytes = b""
    """The cuts as lines of `cuts.jsonl`."""

    records: NDArray[Any]
    """One record per cut, shape (num_cuts,), dtype `RECORD`; offsets count from the start of `lines`."""

    rejects: list[Reject] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    samples_by: dict[str, Counter[str]]
    """Number of samples by name, under the keys `language` and `speaker`."""

    shards: list[ObjectInfo] = field(default_factory=list)
    """The shards of the cuts, in the order of first use; the shard of a record counts from the start of this list."""

    searched: Searched
    bytes_in_epoch: int = 0
    """Bytes of shards and objects that an epoch reads: each cut needs all of its member."""

    bytes_needed: float = 0.0
    """Bytes of the members that the cuts cover."""

    def hours(self, sampling_rate: int) -> float:
        """Returns the hours of the cuts or, if speech was looked for, of the recordings that were searched."""
        return (self.searched.seconds or int(self.records["num_samples"].sum()) / sampling_rate) / 3600

    def to_bytes(self) -> bytes:
        """Returns a compressed form that `from_bytes` reads."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("lines", "records")}
        # json, because orjson does not write file names that are not Unicode.
        header = json.dumps(values | {"num_records": len(self.records), "layout": _LAYOUT}).encode()
        return zlib.compress(header + b"\n" + self.records.tobytes() + self.lines, 1)

    @classmethod
    def from_bytes(cls, content: bytes) -> "Found":
        """Returns what `to_bytes` of this version of the package wrote.

        Raises:
            ValueError, KeyError, zlib.error: It is damaged.
        """
        header, _, content = zlib.decompress(content).partition(b"\n")
        values = json.loads(header)
        if values.pop("layout") != _LAYOUT:
            raise ValueError("written by another version of the package")
        num_bytes = values.pop("num_records") * RECORD.itemsize
        return cls(
            lines=content[num_bytes:],
            records=np.frombuffer(content[:num_bytes], RECORD),
            rejects=[Reject(*reject) for reject in values.pop("rejects")],
            notes=[Note(*note) for note in values.pop("notes")],
            samples_by={kind: Counter(counts) for kind, counts in values.pop("samples_by").items()},
            shards=[ObjectInfo(*shard) for shard in values.pop("shards")],
            searched=Searched(*values.pop("searched")),
            **values,
        )


class _Row(NamedTuple):
    """A cut that was added, without its dict and its bytes."""

    line: bytes
    cut_id: str
    entry_id: str
    num_samples: int
    start_us: int
    channel: int
    file_rate: int
    number: int
    language: str | None
    speaker: str | None
    member: tuple[ObjectInfo, int, int, int | None] | None
    """Shard, offset, length and checksum."""

    version: FileVersion | None
    content: int
    place: str
    """Where the bytes are that `content` is the digest of."""

    bytes_needed: float


class Collector:
    """Collects the outcomes of the entries of a task, in the order of their numbers.

    The members of a tar that is read as a stream arrive in another order than the lines of a manifest.
    """

    def __init__(self) -> None:
        self._num_entries = 0
        self._found: dict[int, list[_Row | Reject | Searched | Note]] = {}

    def add(self, outcomes: Iterable[Outcome], number: int, where: str, *, replaces: bool = False) -> None:
        """Adds the outcomes of an entry.

        Args:
            outcomes: Its cuts, rejects, notes and speech.
            number: The number of the entry or of its item, counted from 1.
            where: Its position in the input.
            replaces: Whether the number is that of the entry, which then replaces an earlier one with this number.
        """
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
        rows, rejects, searched, notes = list[_Row](), list[Reject](), list[Searched](), list[Note]()
        for outcome in (outcome for _, found in sorted(self._found.items()) for outcome in found):
            if isinstance(outcome, _Row):
                rows.append(outcome)
            elif isinstance(outcome, Reject):
                rejects.append(outcome)
            elif isinstance(outcome, Note):
                notes.append(outcome)
            else:
                searched.append(outcome)
        shards: dict[ObjectInfo, int] = {}
        samples_by: dict[str, Counter[str]] = {"language": Counter(), "speaker": Counter()}
        for row in rows:
            if row.member:
                shards.setdefault(row.member[0], len(shards))
            if row.language:
                samples_by["language"][row.language] += row.num_samples
            if row.speaker:
                samples_by["speaker"][row.speaker] += row.num_samples
        return Found(
            num_entries=self._num_entries,
            lines=b"".join([row.line for row in rows]),
            records=_records_of(rows, shards),
            rejects=rejects,
            notes=notes,
            samples_by=samples_by,
            shards=[*shards],
            searched=Searched(
                sum((each.seconds for each in searched), 0.0), sum((each.speech for each in searched), 0.0)
            ),
            bytes_in_epoch=sum(row.member[2] for row in rows if row.member),
            bytes_needed=sum((row.bytes_needed for row in rows), 0.0),
        )


def _row_of(cut: Cut, number: int, where: str) -> _Row | Reject:
    """Returns a cut as a row.

    One that cannot be written as JSON becomes a reject: its file name is not Unicode, a label is nested deeper than 254
    levels, or an integer in a label has more than 64 bits.
    """
    row, num_samples, file_rate, member, version, content, entry_id = cut
    try:
        line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        detail = f"its name or a label is not Unicode, nested too deep or too large a number: {error}"
        return Reject(where, row["id"], "unreadable", detail).shown()
    language = speaker = None
    for label in row["supervisions"][:1]:
        language, speaker = label.get("language"), label.get("speaker")
    address, needed = None, 0.0
    if member:
        address = member.shard, member.offset, member.length, member.crc32
        needed = member.length * min(1.0, row["duration"] / row["recording"]["duration"])
    place = "" if not content else f"{member.location}\0{member.offset}" if member else path_of(row)
    channel = _MIXED_CHANNEL if "custom" in row and is_mixed(row) else row["channel"]
    start_us = round(row["start"] * 1e6)
    return _Row(
        line, row["id"], entry_id or row["id"], num_samples, start_us, channel, file_rate, number, language, speaker,
        address, version, content, place, needed,
    )  # fmt: skip


def _records_of(rows: list[_Row], shards: dict[ObjectInfo, int]) -> NDArray[Any]:
    """Returns the records of cuts; `shards` numbers the shards of their members."""
    records = np.zeros(len(rows), RECORD)
    if not rows:
        return records
    columns = dict(zip(_Row._fields, zip(*rows, strict=True), strict=True))
    for name in ("num_samples", "start_us", "channel", "file_rate", "number", "content"):
        records[name] = columns[name]
    records["offset"][1:] = np.cumsum([len(row.line) for row in rows[:-1]])
    records["id"] = records["entry"] = _digests(columns["cut_id"])
    if columns["entry_id"] != columns["cut_id"]:
        entries = dict.fromkeys(columns["entry_id"])
        digests = dict(zip(entries, _digests(entries).tolist(), strict=True))
        records["entry"] = np.array([digests[entry_id] for entry_id in columns["entry_id"]], np.uint64)
    if any(columns["content"]):
        records["place"] = _digests(columns["place"])
    addresses = zip(*[_address(row, shards) for row in rows], strict=True)
    for name, values in zip(("begin", "extent", "crc32", "has_crc32"), addresses, strict=True):
        records[name] = values
    return records


def _digests(texts: Iterable[str]) -> NDArray[np.uint64]:
    digests = [blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), "<u8")


def _address(row: _Row, shards: dict[ObjectInfo, int]) -> tuple[int, int, int, bool]:
    """Returns begin, extent, crc32 and has_crc32 of the record of a cut."""
    if row.member is None:
        return (*(row_of(row.version) if row.version else (0, NO_SHARD << 32)), 0, True)
    shard, offset, length, crc32 = row.member
    return offset, shards[shard] << 32 | length, crc32 or 0, crc32 is not None
