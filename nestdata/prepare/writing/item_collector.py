"""Collects what a worker finds in consecutive items of a source into one `ProbedItems`."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.audio.channels import is_mixed
from nestdata.audio.lhotse_audio import is_resampled
from nestdata.corpus.addresses import NO_SHARD
from nestdata.corpus.file_version import row_of
from nestdata.errors import shortened
from nestdata.prepare.speech.measures import SpeechTotals
from nestdata.prepare.writing.draw import MAX_DRAWN, KeyedDraw, key_of
from nestdata.prepare.writing.found import Cut, Reject
from nestdata.prepare.writing.probed_items import ProbedItems
from nestdata.prepare.writing.records import RECORD
from nestdata.storage import FileVersion, ObjectInfo

# The channel in the fingerprint of a cut that is the average of all channels.
_MIXED_CHANNEL = -1
# Characters of the id and the explanation of a reject.
_MAX_TEXT = 2000


class _MemberAddress(NamedTuple):
    """Where the audio of a cut is in a shard. A `Member` itself would keep its bytes in memory."""

    shard: ObjectInfo
    offset: int
    length: int
    crc32: int | None


class _Columns(NamedTuple):
    """The cuts that were added, one value per cut in each column."""

    line: Sequence[bytes] = ()
    cut_id: Sequence[str] = ()
    num_samples: Sequence[int] = ()
    start_us: Sequence[int] = ()
    channel: Sequence[int] = ()
    number: Sequence[int] = ()
    """Number of the entry or item."""

    is_resampled: Sequence[bool] = ()
    language: Sequence[str | None] = ()
    """None or empty for a cut without one."""

    speaker: Sequence[str | None] = ()
    """None or empty for a cut without one."""

    member: Sequence[_MemberAddress | None] = ()
    version: Sequence[FileVersion | None] = ()


# Index of the number in a row of `_Columns`.
_NUMBER = _Columns._fields.index("number")


class ItemCollector:
    """Collects the cuts and rejects of consecutive items of one source into a `ProbedItems`.

    They are in the order of their numbers, whatever the order in which they were added: the members of a tar that is
    read as a stream arrive in another order than the lines of a manifest.
    """

    def __init__(self) -> None:
        self._num_entries = 0
        # Plain lists and tuples, because this takes a fifth of the time of a line whose duration is trusted.
        self._rows: list[tuple[Any, ...]] = []
        self._rejects: list[tuple[int, Reject]] = []
        self._speech: list[tuple[int, SpeechTotals]] = []
        # Of each entry with a number of its own, how many rows, rejects and totals there were before it.
        self._begun: dict[int, tuple[int, int, int]] = {}

    def add(self, found: Iterable[Cut | Reject | SpeechTotals], number: int, where: str, *, replaces: bool) -> None:
        """Adds the cuts, rejects and speech of an entry.

        Args:
            found: The cuts, rejects and speech.
            number: The number of the entry or of its item, counted from 1.
            where: Its position in the input.
            replaces: Whether the number is that of the entry, which then replaces an earlier one with this number.
        """
        if replaces:
            self._num_entries += number not in self._begun
            self._begun[number] = len(self._rows), len(self._rejects), len(self._speech)
        else:
            self._num_entries += 1
        for outcome in found:
            match outcome:
                case Cut():
                    self._add_cut(outcome, number, where)
                case Reject():
                    self._add_reject(outcome, number)
                case SpeechTotals():
                    self._speech.append((number, outcome))

    def _add_cut(self, cut: Cut, number: int, where: str) -> None:
        """Adds a cut.

        One that cannot be written as JSON becomes a reject: its file name is not Unicode, a label is nested deeper
        than 254 levels, or an integer in a label has more than 64 bits.
        """
        row, num_samples, member, version = cut
        try:
            line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError as error:
            detail = f"its name or a label is not Unicode, nested too deep or too large a number: {error}"
            self._add_reject(Reject(where, row["id"], "unreadable", detail), number)
            return
        language = speaker = None
        for label in row["supervisions"][:1]:
            language, speaker = label.get("language"), label.get("speaker")
        address = member and _MemberAddress(member.shard, member.offset, member.length, member.crc32)
        # One value for each field of `_Columns`.
        self._rows.append(
            (
                line, row["id"], num_samples, round(row["start"] * 1e6),
                _MIXED_CHANNEL if "custom" in row and is_mixed(row) else row["channel"],
                number, is_resampled(row["recording"]), language, speaker, address, version,
            )
        )  # fmt: skip

    def _add_reject(self, reject: Reject, number: int) -> None:
        """Adds a reject, without its secrets and with long names shortened."""
        reject = reject.without_secrets()
        cut_id, detail = shortened(reject.cut_id, _MAX_TEXT), shortened(reject.detail, _MAX_TEXT)
        if cut_id is not reject.cut_id or detail is not reject.detail:
            reject = reject._replace(cut_id=cut_id, detail=detail)
        self._rejects.append((number, reject))

    def collected(self) -> ProbedItems:
        """Returns all cuts and rejects that were added."""
        if self._begun:
            self._drop_replaced()
        columns = _Columns(*zip(*self._rows, strict=True)) if self._rows else _Columns()
        shards = {member.shard: None for member in columns.member if member}
        records = _records_of(columns, {shard: number for number, shard in enumerate(shards)})
        return ProbedItems(
            num_entries=self._num_entries,
            lines=b"".join(columns.line),
            records=records,
            rejects=[reject._replace(audio=None) for _, reject in self._rejects],
            num_resampled=sum(columns.is_resampled),
            samples_by={
                "language": _samples_by(columns.language, columns.num_samples),
                "speaker": _samples_by(columns.speaker, columns.num_samples),
            },
            shards=[*shards],
            speech=SpeechTotals.sum([totals for _, totals in self._speech]),
            drawn_cuts=_draw_cuts(columns.language, records["id"]),
            drawn_rejects=_draw_rejects([reject for _, reject in self._rejects]),
        )

    def _drop_replaced(self) -> None:
        """Drops the results of entries that were replaced, and sorts the others by number."""
        begun, nothing = self._begun, (0, 0, 0)
        self._rows = [row for index, row in enumerate(self._rows) if index >= begun.get(row[_NUMBER], nothing)[0]]
        self._rows.sort(key=lambda row: row[_NUMBER])
        self._rejects = [
            reject for index, reject in enumerate(self._rejects) if index >= begun.get(reject[0], nothing)[1]
        ]
        self._rejects.sort(key=lambda reject: reject[0])
        self._speech = [
            totals for index, totals in enumerate(self._speech) if index >= begun.get(totals[0], nothing)[2]
        ]


def _records_of(columns: _Columns, shards: dict[ObjectInfo, int]) -> NDArray[Any]:
    """Returns the records of cuts; `shards` numbers the shards of their members."""
    records = np.zeros(len(columns.line), RECORD)
    if not columns.line:
        return records
    for name in ("num_samples", "start_us", "channel", "number"):
        records[name] = getattr(columns, name)
    records["offset"][1:] = np.cumsum([len(line) for line in columns.line[:-1]])
    digests = [hashlib.blake2b(cut_id.encode(), digest_size=8).digest() for cut_id in columns.cut_id]
    records["id"] = np.frombuffer(b"".join(digests), "<u8")
    if shards or any(columns.version):
        pairs = zip(columns.member, columns.version, strict=True)
        addresses = [_address(member, version, shards) for member, version in pairs]
        for name, values in zip(("begin", "extent", "crc32", "has_crc32"), zip(*addresses, strict=True), strict=True):
            records[name] = values
    else:
        records["extent"], records["has_crc32"] = NO_SHARD << 32, 1
    return records


def _address(
    member: _MemberAddress | None, version: FileVersion | None, shards: dict[ObjectInfo, int]
) -> tuple[int, int, int, int]:
    """Returns begin, extent, crc32 and has_crc32 of the record of a cut."""
    if member is None:
        return (*(row_of(version) if version else (0, NO_SHARD << 32)), 0, 1)
    return member.offset, shards[member.shard] << 32 | member.length, member.crc32 or 0, member.crc32 is not None


def _draw_cuts(languages: Sequence[Any], digests: NDArray[Any]) -> KeyedDraw[int]:
    """Draws cuts of each language by the digests of their ids."""
    drawn, found = KeyedDraw[int](), Counter[str]()
    # Ascending, so that only the first cuts of each language have to be offered.
    for index in np.argsort(digests, kind="stable").tolist() if any(languages) else ():
        language = languages[index]
        if language and isinstance(language, str) and found[language] < MAX_DRAWN:
            found[language] += 1
            drawn.offer(language, int(digests[index]), int(digests[index]))
    return drawn


def _draw_rejects(rejects: Iterable[Reject]) -> KeyedDraw[Reject]:
    """Draws rejects of each reason by their ids."""
    drawn = KeyedDraw[Reject]()
    for reject in rejects:
        drawn.offer(reject.reason, key_of(reject.cut_id), reject)
    return drawn


def _samples_by(names: Sequence[str | None], num_samples: Sequence[int]) -> Counter[str]:
    """Returns the number of samples by name."""
    total: Counter[str] = Counter()
    for name, number in zip(names, num_samples, strict=True):
        if name:
            total[name] += number
    return total
