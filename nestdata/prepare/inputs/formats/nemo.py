"""NeMo's manifests: one JSON object per line, which names a file or, in a tarred data set, a member of a numbered tar.

Source: NVIDIA NeMo 3.0, `convert_to_tarred_audio_dataset.py`, which writes them, and `LazyNeMoTarredIterator` and
`TarredAudioToTextDataLayer`, which read them. A file with several lines is stored once; the further lines are called
`NAME-sub1.flac`, `NAME-sub2.flac`. With its option force_codec, members have another suffix than the lines.
"""

import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import orjson

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.audio import Member, Unusable
from nestdata.prepare.inputs.entry import (
    AUDIO_KEYS,
    AUDIO_SUFFIXES,
    Entry,
    cut_id_of,
    seconds,
    span_suffix,
)
from nestdata.prepare.inputs.format import Format, GivenInput, Opened
from nestdata.prepare.inputs.formats.nemo_shards import find_tars
from nestdata.prepare.inputs.grouping import grouped_lines
from nestdata.prepare.inputs.json_objects import ObjectSource, spread_objects
from nestdata.prepare.inputs.lines import ONE_PER_LINE, check_manifest, numbered_lines, parse_object
from nestdata.prepare.inputs.names import FileNames, entry_of_file
from nestdata.prepare.inputs.patterns import check_shards
from nestdata.prepare.inputs.shard import OpenShard, damage, entry_number, open_shard, shard_and_position, unsafe
from nestdata.prepare.inputs.tar import TarError, plain_name, stem_and_suffix
from nestdata.storage import join

_REPEAT = re.compile(r"(.+)-sub\d+(\.\w+)?")
_SPAN_KEYS = frozenset({*AUDIO_KEYS, "offset", "duration"})
_NOT_LABELS = _SPAN_KEYS | {"shard_id", "_skipme"}


@dataclass(frozen=True, slots=True)
class NemoManifest(ObjectSource):
    """Lines with `audio_filepath` or `audio_filename`, and optionally `offset`, `duration` and labels."""

    path: Path | str
    root: str
    names: FileNames
    is_spread: bool = False

    def entries(self, number: int, item: bytes) -> Iterator[Entry]:
        """Yields the entry of a line; none for a blank one."""
        where = self.where(number)
        row = parse_object(item, where)
        if row is None:
            return
        name = _name_in(row, where)
        if "shard_id" in row or name[-4:].lower() in (".tar", ".tgz"):
            raise ManifestError(
                f"{where}: a line of a tarred data set ({_shard_in(row, name)}) in a manifest of files. Begin the "
                "manifest with a line that has a shard_id, or give the archives with --tars PATTERN."
            )
        labels = {key: value for key, value in row.items() if key not in _SPAN_KEYS}
        span = seconds(row, "offset", where), seconds(row, "duration", where)
        yield entry_of_file(where, name, self.names, self.root, span=span, labels=labels)


class _Item(NamedTuple):
    """The lines of one shard."""

    tar: str
    """Absolute path or URL."""

    manifest: str
    """Absolute path or URL."""

    manifest_index: int
    """Index of the manifest."""

    lines: list[tuple[int, bytes]] | None
    """Lines with their numbers, counted from 1; None for all lines of the manifest."""


class _Line(NamedTuple):
    """A parsed line."""

    number: int
    """Number of the entry."""

    where: str
    name: str
    offset: float | None
    """Start of the span in seconds; None for the start of the file."""

    duration: float | None
    labels: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NemoTarred:
    """One manifest with a `shard_id` in each line, or one manifest for each tar."""

    items_per_task: ClassVar[int] = 1
    path: Path | str
    manifests: tuple[str, ...] = field(repr=False)  # each item names the manifests that it reads
    """Absolute paths or URLs."""

    tars: tuple[tuple[int, str], ...] = field(repr=False)
    """Absolute paths or URLs of the tars, with their numbers."""

    is_sharded: bool
    """Whether there is one manifest for each tar, in the order of `tars`."""

    folder: str
    """Absolute path or URL that the names of members are relative to: the folder of the tars."""

    root: str
    scratch: str
    """Folder for temporary files, for a manifest whose lines are not in the order of the shards."""

    def items(self) -> Iterator[_Item]:
        """Yields the shards, in the order in which the manifest first names them.

        Raises:
            ManifestError: A line names a shard without a tar, or has no shard.
        """
        if self.is_sharded:
            for index, (_, tar) in enumerate(self.tars):
                yield _Item(tar, self.manifests[index], index, None)
            return
        tars = dict(self.tars)
        manifest = self.manifests[0]
        for shard, lines in grouped_lines(manifest, lambda *line: self._shard_of(tars, *line), self.scratch):
            yield _Item(tars[shard], manifest, 0, lines)

    def entries(self, number: int, item: _Item) -> Iterator[Entry]:  # noqa: ARG002, lines have numbers of their own
        """Yields the entries of the lines of a shard, in the order of the members of its tar.

        Raises:
            ManifestError: A line cannot be parsed, or the tar does not exist.
            StorageError: The tar or the manifest cannot be read.
        """
        lines = item.lines if item.lines is not None else numbered_lines(item.manifest)
        parsed = [line for position, content in lines if (line := self._parsed(item.manifest_index, position, content))]
        with open_shard(item.tar) as shard:
            yield from self._joined(parsed, shard)

    def files(self, item: _Item) -> list[str]:
        """Returns the tar, and the manifest if it is that of the shard alone."""
        return [item.tar, item.manifest] if item.lines is None else [item.tar]

    def where(self, number: int) -> str:
        """Returns the manifest and the line number, counted from 1."""
        manifest, line = shard_and_position(number)
        return f"{self.manifests[manifest]}:{line}"

    def count(self) -> int | None:
        """Returns the number of tars."""
        return len(self.tars)

    def _shard_of(self, tars: dict[int, str], position: int, content: bytes) -> int | None:
        """Returns the number of the shard of a line; None for a blank line."""
        manifest = self.manifests[0]
        row = parse_object(content, f"{manifest}:{position}")
        if row is None:
            return None
        shard = row.get("shard_id", self.tars[0][0] if len(tars) == 1 else None)
        if type(shard) is not int:
            raise ManifestError(
                f"{manifest}:{position}: shard_id is {shard!r}. Give the number of the tar that holds the audio, "
                "as NeMo's converter writes it."
            )
        if shard not in tars:
            raise ManifestError(
                f"{manifest}:{position}: shard_id {shard} has no tar; there are {len(tars)}, from "
                f"{self.tars[0][1]} to {self.tars[-1][1]}. Give all tars with --tars PATTERN, "
                "in quotes."
            )
        return shard

    def _parsed(self, manifest: int, position: int, content: bytes) -> _Line | None:
        """Parses a line; returns None for a blank line, and for one that NeMo skips."""
        number = entry_number(manifest, position)
        where = self.where(number)
        row = parse_object(content, where)
        if row is None or row.get("_skipme"):
            return None
        name = _name_in(row, where)
        labels = {key: value for key, value in row.items() if key not in _NOT_LABELS}
        return _Line(
            number, where, plain_name(name), seconds(row, "offset", where), seconds(row, "duration", where), labels
        )

    def _joined(self, lines: list[_Line], shard: OpenShard) -> Iterator[Entry]:
        """Yields the entry of each line, and replaces it if a later member has the same or a better name."""
        lookup = _Lookup(lines)
        location = shard.info.location
        problem: Unusable | None = None
        try:
            for found in shard.members():
                name = plain_name(found.name)
                hits = lookup.hits(name)
                if not hits:
                    continue
                member = unsafe(found, location) if found.problem else shard.member(found)
                for line, others in hits:
                    yield Entry(
                        line.where,
                        self._cut_id(line, name),
                        _ambiguous(member, line.name, others, location) if others else member,
                        offset=line.offset or 0.0,
                        duration=line.duration,
                        labels=line.labels,
                        number=line.number,
                    )
        except TarError as error:
            problem = damage(error, location)
        for line in lookup.missing():
            detail = f"{location}: no member is called {line.name!r}"
            reason = problem or Unusable("no_such_member", detail)
            yield Entry(line.where, self._cut_id(line, line.name), reason, number=line.number)

    def _cut_id(self, line: _Line, member: str) -> str:
        """Returns the id that the same span of a file would have."""
        cut_id = cut_id_of(join(self.folder, posixpath.normpath(member)), self.root)
        return cut_id if line.offset is None else cut_id + span_suffix(line.offset, line.duration)


def _detect(given: GivenInput) -> bool:
    if given.kind == "manifest":
        return any(key in given.row for key in AUDIO_KEYS)
    return given.kind == "manifests"


def _open(given: GivenInput) -> Opened:
    if given.is_pattern:
        check_shards(given.names, str(given.path))
    elif b'"shard_id"' not in given.first_object and given.tars is None:
        check_manifest(given.path)
        names = _names(given)
        return names.base, lambda root: NemoManifest(given.path, root, names, given.is_spread)
    elif given.is_spread:
        raise ManifestError(f"{given.path}: a manifest of a tarred data set in another form. {ONE_PER_LINE}")
    folder, tars = find_tars(given)
    return folder, lambda root: NemoTarred(
        path=given.path,
        manifests=tuple(given.names),
        tars=tars,
        is_sharded=given.is_pattern,
        folder=folder,
        root=root,
        scratch=str(given.options.write_to / f"lines.{given.number}"),
    )


FORMAT = Format("nemo", _detect, _open)


def _names(given: GivenInput) -> FileNames:
    if isinstance(given.path, str):
        return FileNames((given.parent,), given.parent)
    return FileNames.of(_first_names(given), (given.parent, os.getcwd()), given.parent)


def _first_names(given: GivenInput) -> Iterator[str]:
    """Yields the name in each line that has one; the manifest is only opened if the first name is not enough."""
    yield from _name_if_any(given.first_object)
    lines = (line for _, line in numbered_lines(given.location))
    for item in spread_objects(given.path) if given.is_spread else lines:
        yield from _name_if_any(item)


def _name_if_any(item: bytes) -> Iterator[str]:
    try:
        yield _name_in(orjson.loads(item), "")
    except (ValueError, TypeError, AttributeError, ManifestError):
        return  # an error when it is read


def _ambiguous(found: Member | Unusable, name: str, others: Sequence[str], location: str) -> Unusable:
    detail = f"{location}: {name!r} may be any of the members {' and '.join(map(repr, others))}"
    return Unusable("ambiguous_member", detail, found.member)


class _Lookup:
    """Finds the lines that a member belongs to, one member after the other.

    A line is matched by the name of the member or, failing that, by its name without suffix; both with and without the
    `-subN` of a repeated file.
    """

    def __init__(self, lines: list[_Line]) -> None:
        self._lines = lines
        self._by_name: dict[str, list[int]] = defaultdict(list)
        self._by_stem: dict[str, list[int]] = defaultdict(list)
        # Of each line, the members that match it best so far, and whether they match by their whole names.
        self._found: list[tuple[bool, tuple[str, ...]]] = [(False, ())] * len(lines)
        for index, line in enumerate(lines):
            repeat = _REPEAT.fullmatch(line.name)
            for name in {line.name, repeat[1] + (repeat[2] or "")} if repeat else {line.name}:
                self._by_name[name].append(index)
                self._by_stem[stem_and_suffix(name)[0]].append(index)

    def hits(self, member: str) -> list[tuple[_Line, tuple[str, ...]]]:
        """Returns the lines of a member, each with all members that match it as well if there is more than one."""
        named = frozenset(self._by_name.get(member, ()))
        stem, suffix = stem_and_suffix(member)
        same_stem = self._by_stem.get(stem, ()) if suffix in AUDIO_SUFFIXES else ()
        hits = []
        for index in sorted(named.union(same_stem)):
            is_named, (was_named, members) = index in named, self._found[index]
            if members and was_named and not is_named:
                continue
            members = (*members, member) if was_named == is_named else (member,)
            self._found[index] = is_named, members
            hits.append((self._lines[index], members if len(members) > 1 else ()))
        return hits

    def missing(self) -> Iterator[_Line]:
        """Yields the lines that no member has matched."""
        for line, (_, members) in zip(self._lines, self._found, strict=True):
            if not members:
                yield line


def _shard_in(row: dict[str, Any], name: str) -> str:
    return f"shard_id {row['shard_id']}" if "shard_id" in row else repr(name)


def _name_in(row: dict[str, Any], where: str) -> str:
    """Returns the name of the audio file in a line; raises ManifestError if it cannot be that of a file."""
    name = row.get("audio_filepath") or row.get("audio_filename")
    if isinstance(name, str) and posixpath.basename(name) and "\0" not in name:
        return name
    if not any(key in row for key in AUDIO_KEYS):
        raise ManifestError(f"{where}: the key audio_filepath is missing. Add it, or drop this line.")
    name = next(row[key] for key in AUDIO_KEYS if key in row)
    if isinstance(name, list):
        raise ManifestError(
            f"{where}: audio_filepath is a list, for NeMo the channels of one recording: {str(name)[:80]}. Join the "
            "files into one, for instance with `sox -M`, or give each file a line."
        )
    raise ManifestError(f"{where}: audio_filepath is {name!r}. Give the path of one file as a string.")
