"""NeMo's manifests: one JSON object per line, which names a file or, in a tarred data set, a member of a numbered tar.

Source: NVIDIA NeMo 3.0, `convert_to_tarred_audio_dataset.py`, which writes them, and `LazyNeMoTarredIterator` and
`TarredAudioToTextDataLayer`, which read them. A file with several lines is stored once; the further lines are called
`NAME-sub1.flac`, `NAME-sub2.flac`. With its option force_codec, members have another suffix than the lines.
"""

import os
import posixpath
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, ClassVar

import orjson

from nestdata.columns import Column, key_of
from nestdata.errors import ManifestError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import AUDIO_KEYS, AUDIO_SUFFIXES, Entry, Member, Unusable
from nestdata.prepare.inputs.format import GivenInput, Opened
from nestdata.prepare.inputs.lines import (
    ONE_PER_LINE,
    Manifest,
    ObjectSource,
    numbered_lines,
    parse_object,
)
from nestdata.prepare.inputs.patterns import (
    TAR,
    check_shards,
    expand,
    folder_of,
    numbered,
    objects_below,
    shard_number,
)
from nestdata.prepare.inputs.rows import (
    AUDIO_NAMES,
    FileNames,
    Meaning,
    audio_name,
    check_columns,
    cut_id_of,
    entry_of_row,
    meaning_in,
    names_audio,
    placed,
)
from nestdata.prepare.inputs.tar import (
    OpenShard,
    ShardSource,
    entry_number,
    open_shard,
    plain_name,
    stem_and_suffix,
)
from nestdata.storage import is_url, join, name_of, parent

_REPEAT = re.compile(r"(.+)-sub\d+(\.\w+)?")
_NOT_LABELS = frozenset({"shard_id", "_skipme"})
_NUMBERED_TAR = re.compile(r"(.*?)\d+(\D*)")
_SHARDED_MANIFESTS = "sharded_manifests"


@dataclass(frozen=True, slots=True)
class NemoManifest(ObjectSource):
    """Lines with the name of a file, and optionally its span, channel and labels; see `rows`."""

    format: ClassVar[InputFormat] = "nemo"
    manifest: Manifest
    names: FileNames
    columns: tuple[Column, ...] = ()

    def entry(self, where: str, row: dict[str, Any]) -> Entry:
        """Returns the entry of a line."""
        meaning = meaning_in(row, where, self.columns)
        entry = entry_of_row(where, row, meaning, self.names, meaning.labels_of(row))
        if "shard_id" in row:
            raise ManifestError(
                f"{where}: a line of a tarred data set (shard_id {row['shard_id']}) in a manifest of files. Begin the "
                "manifest with a line that has a shard_id, or give the archives with --tars PATTERN."
            )
        return entry


@dataclass(slots=True)
class _Line:
    """A parsed line."""

    number: int
    """Number of the entry."""

    where: str
    name: str
    row: dict[str, Any]
    meaning: Meaning
    members: list[str] = field(default_factory=list)
    """The members that match it best so far."""

    is_named: bool = False
    """Whether they match by their whole names, rather than by their names without suffix."""


@dataclass(frozen=True, slots=True)
class NemoTarred(ShardSource):
    """One manifest with a `shard_id` in each line, or one manifest for each tar."""

    format: ClassVar[InputFormat] = "nemo"
    path: Path | str
    shards: tuple[tuple[str, str], ...] = field(repr=False)  # each item names the files that it reads
    """Absolute paths or URLs of the manifest and of the tar of each shard."""

    numbers: tuple[int, ...] = field(repr=False)
    """The `shard_id` of each shard, if all have one manifest."""

    folder: str
    """Absolute path or URL that the names of members are relative to: the folder of the tars."""

    root: str
    columns: tuple[Column, ...] = ()

    def items(self) -> Iterator[tuple[int, tuple[str, ...], list[tuple[int, bytes]] | None]]:
        """Yields the index of a manifest, the files of a shard, and its lines with their numbers, counted from 1.

        The shards of one manifest are in the order in which it first names them, and the manifest is not among their
        files. If a shard has a manifest of its own, its lines are None.

        Raises:
            ManifestError: A line names a shard without a tar, or has no shard.
        """
        if not self.numbers:
            for index, files in enumerate(self.shards):
                yield index, files, None
            return
        tars = {number: tar for number, (_, tar) in zip(self.numbers, self.shards, strict=True)}
        order = [shard for shard, _ in groupby(self._shards_of_lines(tars), lambda pair: pair[0])]
        runs = groupby(self._shards_of_lines(tars), lambda pair: pair[0])
        if len(set(order)) == len(order):
            for shard, run in runs:
                yield 0, (tars[shard],), [line for _, line in run]
            return
        grouped: dict[int, list[tuple[int, bytes]]] = defaultdict(list)  # all lines, as NeMo holds them
        for shard, run in runs:
            grouped[shard].extend(line for _, line in run)
        for shard in [*grouped]:
            yield 0, (tars[shard],), grouped.pop(shard)

    def entries(self, number: int, item: Any) -> Iterator[Entry]:  # noqa: ARG002, lines have numbers of their own
        """Yields the entries of the lines of a shard, in the order of the members of its tar.

        Raises:
            ManifestError: A line cannot be parsed, or the tar does not exist.
            StorageError: The tar or the manifest cannot be read.
        """
        index, files, given = item
        lines = numbered_lines(files[0]) if given is None else given
        parsed = [line for position, content in lines if (line := self._parsed(index, position, content))]
        with open_shard(files[-1]) as shard:
            yield from self._joined(parsed, shard)

    def _shards_of_lines(self, tars: dict[int, str]) -> Iterator[tuple[int, tuple[int, bytes]]]:
        """Yields the lines of the manifest, with their numbers, and the shards that they name."""
        manifest = self.shards[0][0]
        default = self.numbers[0] if len(tars) == 1 else None
        for number, line in numbered_lines(manifest):
            where = f"{manifest}:{number}"
            row = parse_object(line, where)
            if row is None:
                continue
            shard = row.get("shard_id", default)
            if type(shard) is not int or shard not in tars:
                raise ManifestError(
                    f"{where}: no tar has the shard_id {shard!r}; there are {_range(tars)}. Give all tars with --tars "
                    "PATTERN, in quotes."
                )
            yield shard, (number, line)

    def _parsed(self, manifest: int, position: int, content: bytes) -> _Line | None:
        """Parses a line; returns None for a blank line, and for one that NeMo skips."""
        number = entry_number(manifest, position)
        where = self.where(number)
        row = parse_object(content, where)
        if row is None or row.get("_skipme"):
            return None
        meaning = meaning_in(row, where, self.columns)
        return _Line(number, where, plain_name(audio_name(row, meaning, where)), row, meaning)

    def _joined(self, lines: list[_Line], shard: OpenShard) -> Iterator[Entry]:
        """Yields the entry of each line, and replaces it if a later member has the same or a better name.

        A line is matched by the name of a member or, failing that, by its name without suffix; both with and without
        the `-subN` of a repeated file.
        """
        by_name: dict[str, list[_Line]] = defaultdict(list)
        by_stem: dict[str, list[_Line]] = defaultdict(list)
        for line in lines:
            own = _in_one_form(line.name)
            repeat = _REPEAT.fullmatch(own)
            for name in {own, repeat[1] + (repeat[2] or "")} if repeat else {own}:
                by_name[name].append(line)
                by_stem[stem_and_suffix(name)[0]].append(line)
        location = shard.info.location
        for found in shard.members():
            member_name = plain_name(found.name)
            name = _in_one_form(member_name)
            named = by_name.get(name, [])
            for line in named:
                if not line.is_named:
                    line.is_named, line.members = True, []
            stem, suffix = stem_and_suffix(name)
            same_stem = by_stem.get(stem, []) if suffix in AUDIO_SUFFIXES else []
            hits = [*named, *(line for line in same_stem if not line.is_named)]
            if not hits:
                continue
            member = shard.member(found)
            for line in hits:
                line.members.append(member_name)
                audio = member
                if len(line.members) > 1:
                    members = " and ".join(map(repr, line.members))
                    detail = f"{location}: {line.name!r} may be any of the members {members}"
                    audio = Unusable("ambiguous_member", detail, member.member)
                yield self._entry(line, member_name, audio)
        for line in lines:
            if not line.members:
                detail = f"{location}: no member is called {line.name!r}"
                yield self._entry(line, line.name, shard.problem or Unusable("no_such_member", detail))

    def _entry(self, line: _Line, member: str, audio: Member | Unusable) -> Entry:
        """Returns the entry of a line, with the id that the same span of a file would have."""
        cut_id = cut_id_of(join(self.folder, posixpath.normpath(member)), self.root)
        labels = {name: value for name, value in line.meaning.labels_of(line.row).items() if name not in _NOT_LABELS}
        return placed(line.where, cut_id, audio, line.row, line.meaning, labels, line.number)


def open_nemo(given: GivenInput) -> Opened | None:
    """Opens a manifest whose first row names audio, a pattern of manifests, or one that the caller knows as NeMo's."""
    columns = given.options.columns
    if given.format is None and not given.is_pattern:
        is_lhotse = not {"recording", "sources", "tracks"}.isdisjoint(map(key_of, given.row))
        if not names_audio(given.row, columns, AUDIO_KEYS if is_lhotse else AUDIO_NAMES):
            return None
    if given.is_pattern:
        check_shards(given.names, str(given.path))
    elif "shard_id" not in given.row and given.tars is None:
        check_columns(given.row, columns, f"{given.path}:{given.lines.number}")
        names = FileNames.beside(given.parent, _first_names(given))
        return names.base, lambda root: NemoManifest(given.manifest, replace(names, root=root), columns)
    elif given.manifest.is_spread:
        raise ManifestError(f"{given.path}: a manifest of a tarred data set in another form. {ONE_PER_LINE}")
    manifests = numbered(given.names, str(given.path), str(given.path)) if given.is_pattern else {}
    found = _tars_beside(given) if given.tars is None else _tars_named(given.tars)
    missing = next((manifest for number, manifest in manifests.items() if number not in found), None)
    if missing:
        raise ManifestError(
            f"{given.path}: {missing} has no tar with its number among {_range(found)}. Give all tars "
            "with --tars PATTERN, in quotes."
        )
    numbers, folder = [*manifests] if given.is_pattern else sorted(found), folder_of(found.values())
    return folder, lambda root: NemoTarred(
        given.path,
        tuple((manifests.get(number, given.location), found[number]) for number in numbers),
        () if given.is_pattern else tuple(numbers),
        folder,
        root,
        columns,
    )


def _first_names(given: GivenInput) -> Iterator[str]:
    """Yields the name in each row that has one; only the first row is read if its name is enough."""
    manifest = given.manifest
    others = manifest.objects() if manifest.is_spread else manifest.lines()
    for item in chain([b""], others):
        with suppress(ValueError, TypeError, AttributeError, ManifestError):  # an error when it is read
            row = orjson.loads(item) if item else given.row
            yield audio_name(row, meaning_in(row, "", given.options.columns), "")


def _tars_named(pattern: str) -> dict[int, str]:
    """Returns the tars of a pattern by their numbers."""
    location = pattern.rstrip("/") if is_url(pattern) else os.path.abspath(pattern)
    names = [location] if os.path.isfile(location) else expand(location)
    check_shards(names, pattern)
    return _numbered(names, pattern, pattern)


def _numbered(tars: list[str], given: str, pattern: str = "") -> dict[int, str]:
    """Returns tars by their numbers; a single one needs none in its name."""
    return {shard_number(tars[0]) or 0: tars[0]} if len(tars) == 1 else numbered(tars, given, pattern)


def _tars_beside(given: GivenInput) -> dict[int, str]:
    """Finds the only set of numbered tars beside a manifest, or in the folder above `sharded_manifests`."""
    folder = parent(given.names[0])
    folders = [folder, parent(folder)] if name_of(folder) == _SHARDED_MANIFESTS else [folder]
    for directory in folders:
        sets = defaultdict(list)
        for name in _files_in(directory):
            if TAR.fullmatch(name):
                match = _NUMBERED_TAR.fullmatch(name_of(name))
                sets[match.groups() if match else name].append(name)
        if len(sets) > 1:
            examples = " and ".join(sorted(name_of(min(names)) for names in sets.values())[:2])
            raise ManifestError(
                f"{given.path}: several sets of tars in {directory}, such as {examples}. Give one with --tars PATTERN, "
                "in quotes."
            )
        for names in sets.values():
            return _numbered(sorted(names), str(given.path))
    raise ManifestError(
        f"{given.path}: a manifest of a tarred data set, and no tars in {folders[-1]}. Give them with "
        "--tars 'PATTERN', such as 's3://bucket/audio_{0..511}.tar'; give manifests of files one by one."
    )


def _files_in(folder: str) -> list[str]:
    """Returns the files in a folder, without those in its subfolders."""
    if is_url(folder):
        return [info.location for info in objects_below(folder) if parent(info.location) == folder]
    return [entry.path for entry in os.scandir(folder) if entry.is_file()]


def _range(tars: Mapping[int, str]) -> str:
    return f"{len(tars)}, from {tars[min(tars)]} to {tars[max(tars)]}"


def _in_one_form(name: str) -> str:
    """Returns a name in one Unicode form: macOS writes another one than other systems."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)
