"""Lhotse Shar: numbered manifests of cuts, each beside a tar with their audio.

Source: Lhotse 1.33, `lhotse/shar/writers` and `lhotse/shar/readers`. In the tar, the audio of a cut is `ID.flac` (or
another suffix), followed by `ID.json`, a Recording without a source. A cut without audio has `ID.nodata` and
`ID.nometa`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nestdata.errors import ManifestError, in_one_line
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.audio import LhotseCut, Member, Unusable
from nestdata.prepare.inputs.entry import Entry
from nestdata.prepare.inputs.format import Format, GivenInput, Opened
from nestdata.prepare.inputs.formats.lhotse import LhotseManifest
from nestdata.prepare.inputs.lines import Manifest, numbered_lines, parse_object
from nestdata.prepare.inputs.rows import FileNames
from nestdata.prepare.inputs.tar import (
    OpenShard,
    ShardSource,
    entry_number,
    open_shard,
    plain_name,
    stem_and_suffix,
)
from nestdata.storage import join, name_of, parent

_CUTS = re.compile(r"cuts\.(.+)\.jsonl(?:\.gz)?")
# Metadata of a recording is some hundred bytes.
_MAX_METADATA = 1 << 24


class _Line(NamedTuple):
    """A cut of the manifest of a shard."""

    number: int
    """Number of the entry."""

    cut_id: str
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SharDirectory(ShardSource):
    """The cuts of a Shar directory, with their own ids. Fields other than the recording are not read."""

    format: ClassVar[InputFormat] = "shar"
    path: Path | str
    shards: tuple[tuple[str, str], ...] = field(repr=False)  # each item names the shards that it reads
    """Absolute paths or URLs of the manifest and of the tar of each shard."""

    parser: LhotseManifest
    """Completes and checks cuts."""

    def entries(self, number: int, item: tuple[int, tuple[str, str]]) -> Iterator[Entry]:  # noqa: ARG002
        """Yields the cuts of a shard, in the order of its tar.

        Raises:
            ManifestError: A cut cannot be parsed, or the tar does not exist.
            StorageError: A file cannot be read.
        """
        index, (cuts, tar) = item
        lines: dict[str, _Line] = {}
        for position, content in numbered_lines(cuts):
            row = parse_object(content, f"{cuts}:{position}")
            if row is None:
                continue
            cut_id = row.get("id")
            if not isinstance(cut_id, str) or not cut_id:
                raise ManifestError(f"{cuts}:{position}: the id is {cut_id!r}. Give a string.")
            line = _Line(entry_number(index, position), cut_id, row)
            if lines.setdefault(cut_id, line) is not line:
                detail = f"an earlier line of {cuts} has the same id"
                yield self._rejected(line, Unusable("duplicate_id", detail))
        with open_shard(tar) as shard:
            yield from self._in_tar(lines, shard)

    def _in_tar(self, lines: dict[str, _Line], shard: OpenShard) -> Iterator[Entry]:
        """Yields the entry of each line, with its audio if the next member is its recording."""
        location = shard.info.location
        audio: tuple[_Line, Member | Unusable] | None = None
        seen: set[str] = set()
        for found in shard.members():
            stem, suffix = stem_and_suffix(plain_name(found.name))
            line = lines.get(stem) or lines.get(found.name.rpartition(".")[0])
            if line is None:
                continue
            if suffix != ".json":
                audio = line, shard.member(found)
                continue
            if audio is None or audio[0] is not line:
                continue
            if isinstance(audio[1], Unusable):
                yield self._rejected(line, audio[1])
            elif found.size > _MAX_METADATA or not isinstance(metadata := shard.member(found), Member):
                detail = f"{location}: {found.name} is not a recording, or has too many bytes"
                yield self._rejected(line, Unusable("unreadable", detail))
            else:
                name = f"{location}: {plain_name(found.name)}"
                yield self._entry(line, metadata.read(), audio[1], name)
            seen.add(line.cut_id)
            audio = None
        for cut_id, line in lines.items():
            if cut_id not in seen:
                detail = f"{location}: no audio for this cut, followed by its recording in {cut_id}.json"
                yield self._rejected(line, shard.problem or Unusable("no_such_member", detail))

    def _entry(self, line: _Line, metadata: bytes, member: Member, name: str) -> Entry:
        where = self.where(line.number)
        try:
            recording = json.loads(metadata)
            cut = self.parser.parse_cut(_without_fields(line.row) | {"recording": recording}, where)
        except ManifestError:
            raise
        except Exception as error:  # Lhotse's constructors raise errors of many kinds
            raise ManifestError(
                f"{where}: not a cut with the recording {name} ({in_one_line(error)}). Write the shard again."
            ) from error
        if isinstance(cut, Unusable):
            return self._rejected(line, cut)
        return Entry(where, line.cut_id, LhotseCut(cut, member), number=line.number)

    def _rejected(self, line: _Line, problem: Unusable) -> Entry:
        return Entry(self.where(line.number), line.cut_id, problem, number=line.number)


def _detect(given: GivenInput) -> bool:
    return given.kind == "folder" and bool(_shards_in(given))


def _open(given: GivenInput) -> Opened:
    path, shards = given.folder, _shards_in(given)
    if not shards:
        raise ManifestError(f"{path}: no cuts.000000.jsonl.gz or the like. Give the folder that holds them.")
    parser = LhotseManifest(Manifest(path, False), FileNames((given.location,), given.location), given.options.channel)
    return given.location, lambda _: SharDirectory(path, shards, parser)


FORMAT = Format(_detect, _open)


def _shards_in(given: GivenInput) -> tuple[tuple[str, str], ...]:
    """Returns the shards of a Shar directory, sorted by name; empty for another directory.

    Raises:
        ManifestError: A manifest has no tar with recordings.
    """
    found = set(given.children)
    shards = []
    for cuts in sorted(found):
        if match := _CUTS.fullmatch(name_of(cuts)):
            recording = join(parent(cuts), f"recording.{match[1]}.tar")
            if recording not in found:
                raise ManifestError(
                    f"{given.folder}: {name_of(cuts)} has no {name_of(recording)} beside it, from which its audio "
                    "would be read. Restore it, or move the manifest away."
                )
            shards.append((cuts, recording))
    return tuple(shards)


def _without_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a cut without features and without the custom fields that are in tars of their own."""
    row = {key: value for key, value in row.items() if key != "features"}
    custom = row.get("custom")
    if isinstance(custom, dict):
        row["custom"] = {key: value for key, value in custom.items() if not _is_placeholder(value)}
    return row


def _is_placeholder(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    array = value.get("array")
    stored = [value, array if isinstance(array, dict) else {}, *(value.get("sources") or [])]
    return any(isinstance(part, dict) and "shar" in (part.get("storage_type"), part.get("type")) for part in stored)
