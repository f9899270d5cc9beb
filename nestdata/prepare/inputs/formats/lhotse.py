"""Lhotse's cuts and recordings: manifests of one object per line, corpora, which have such lines, objects, and Shar.

Source of Shar: Lhotse 1.33, `lhotse/shar/writers` and `lhotse/shar/readers`. In the tar of a shard, the audio of a cut
is `ID.flac` (or another suffix), followed by `ID.json`, a Recording without a source. A cut without audio has
`ID.nodata` and `ID.nometa`.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote

import orjson

from nestdata.audio.channels import MIX_FIELD, Channel, is_mixed
from nestdata.errors import ConfigError, ManifestError, StorageError, in_one_line
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import MAX_SECONDS, Entry, File, LhotseCut, Member, Unusable, unusable_command
from nestdata.prepare.inputs.format import GivenInput, Opened, is_corpus
from nestdata.prepare.inputs.lines import Manifest, ObjectSource, check_manifest, numbered_lines, parse_object
from nestdata.prepare.inputs.patterns import object_info
from nestdata.prepare.inputs.rows import FileNames, is_number, label_text
from nestdata.prepare.inputs.tar import (
    OpenShard,
    ShardSource,
    entry_number,
    member_at,
    open_shard,
    plain_name,
    stem_and_suffix,
)
from nestdata.storage import is_url, join, name_of, parent, storage

_CORPUS_FILES = ("meta.json", "index.npy", "cuts.jsonl")
# Pointers of Lhotse 2 to members of tars, as `cuts.jsonl` has them as well. END is the header of the next sample, and
# is not needed beside the header at START. With s=1, Lhotse does not search the tar for a NAME that is elsewhere.
_POINTER = re.compile(r"(?P<tar>[^?]+)\?o=(?P<start>\d{1,18})&e=\d{1,18}(&n=(?P<name>[^&]*)(&s=1)?)?")
# The manifests of a Shar directory.
_CUTS = re.compile(r"cuts\.(.+)\.jsonl(?:\.gz)?")
# Metadata of a recording is some hundred bytes.
_MAX_METADATA = 1 << 24


@dataclass(frozen=True, slots=True)
class LhotseManifest(ObjectSource):
    """Lhotse MonoCuts or recordings; a recording becomes one cut."""

    format: ClassVar[InputFormat] = "lhotse"
    manifest: Manifest
    names: FileNames
    """Relative paths start from the current directory, as in Lhotse, or from the folder of the manifest."""

    channel: Channel | None
    """Channel that the caller asks for; None for the channel of a cut, and for the first one of a recording."""

    def entry(self, where: str, row: dict[str, Any]) -> Entry:
        """Returns the entry of a line; modifies `row`."""
        with _refused_by_lhotse(f"{where}: not a Lhotse cut or recording", "Fix this line."):
            cut = _parse_cut(row, where, self.channel)
        if isinstance(cut, Unusable):
            return Entry(where, row["id"], cut)
        hint = ""
        for source in cut["recording"]["sources"]:
            kind, location = source.get("type"), source.get("source")
            if kind not in ("file", "url", "shar_ptr", "command") or not isinstance(location, str):
                remedy = "Write the audio to files in Lhotse first, with `CutSet.save_audios`"
                if kind == "shar":
                    remedy = "Give the folder of the Shar directory, which has the audio beside the cuts"
                raise ManifestError(f"{where}: a source of type {kind!r}, which is not supported. {remedy}.")
            if kind == "file":
                file = self.names.file(location)
                source["source"], hint = file.location, file.hint
                if is_url(file.location):
                    source["type"] = "url"
        found = self._located(cut)
        return Entry(where, cut["id"], found if isinstance(found, Unusable) else LhotseCut(cut, found, hint=hint))

    def _located(self, cut: dict[str, Any]) -> Member | Unusable | None:
        """Returns the member that the source of a cut points to; None if it is not a pointer into a tar."""
        source = next((source for source in cut["recording"]["sources"] if cut["channel"] in source["channels"]), None)
        if source is not None and source["type"] == "command":
            return unusable_command(source["source"])
        if source is None or source["type"] != "shar_ptr":
            return None
        parts = _POINTER.fullmatch(source["source"])
        if parts is None:
            return Unusable("unknown_pointer", f"{source['source'][:200]!r} is not TAR?o=START&e=END[&n=NAME[&s=1]]")
        tar = self.names.file(parts["tar"]).location
        name = None if parts["name"] is None else unquote(parts["name"], errors="surrogateescape")
        try:
            found = member_at(tar, int(parts["start"]), object_info(tar) if is_url(tar) else storage().info(tar), name)
        except StorageError as error:
            found = Unusable.of(error)
        # With the tar, so that a kept result is not taken once it has been restored.
        return replace(found, audio=File(tar)) if isinstance(found, Unusable) else found


@dataclass(frozen=True, slots=True)
class CorpusCuts(LhotseManifest):
    """The cuts of a corpus that was prepared before, with the present location of their audio."""

    root: str | None = None
    """Where the audio is now; None for the root that the corpus has itself."""

    @property
    def path(self) -> Path:
        """The corpus directory."""
        return Path(self.manifest.path).parent

    def items(self) -> Iterator[bytes]:
        """Yields lines in the order of `cuts.jsonl`.

        Raises:
            CorpusError: The corpus is damaged.
        """
        from nestdata.corpus.corpus import Corpus  # imports numpy, which `--help` can do without

        corpus = Corpus.open(self.path, root=self.root)
        if corpus.is_moved and not corpus.has_bank:
            yield from (orjson.dumps(corpus.line(index)) for index in corpus.input_order().tolist())
            return
        yield from self.manifest.lines()


@dataclass(frozen=True, slots=True)
class LhotseObjects(LhotseManifest):
    """Cuts or recordings in memory, or lazily opened, as the lines that Lhotse would write; `path` is their type."""

    cuts: Any = field(default=None, repr=False)
    """Lhotse's objects; not pickled, because items hold their content."""

    def items(self) -> Iterator[bytes]:
        """Yields lines."""
        for cut in () if self.cuts is None else self.cuts:
            yield orjson.dumps(cut.to_dict(), default=str, option=orjson.OPT_SERIALIZE_NUMPY)

    def count(self) -> int | None:
        """Returns the number of objects; None if they are read lazily."""
        return None if self.cuts is None or self.cuts.is_lazy else len(self.cuts)

    def __reduce__(self) -> tuple[type["LhotseObjects"], tuple[Any, ...]]:
        return LhotseObjects, (self.manifest, self.names, self.channel)


def open_object(given: Any, channel: Channel | None) -> Callable[[str], LhotseManifest]:
    """Opens a `Corpus`, or a set of cuts or recordings of Lhotse, in the channel that is asked for."""
    names = FileNames.of((), (os.getcwd(),), os.getcwd())
    if is_corpus(given):
        return lambda _: CorpusCuts(Manifest(given.path / "cuts.jsonl", False), names, channel, root=given.root)
    return lambda _: LhotseObjects(Manifest(type(given).__name__, False), names, channel, cuts=given)


def open_lhotse(given: GivenInput) -> Opened | None:
    """Opens a manifest of cuts or recordings, or a corpus directory."""
    channel, path = given.options.channel, given.path
    if isinstance(path, str):
        names = FileNames((given.parent,), given.parent)
    else:
        names = FileNames.of((), (os.getcwd(), given.parent), os.getcwd())
    if given.format is None and given.kind == "folder":
        if isinstance(path, str) or not all(map(given.has_file, _CORPUS_FILES)):
            return None
        return given.location, lambda _: CorpusCuts(Manifest(path / "cuts.jsonl", False), names, channel)
    if given.format is None:
        is_cut = str(given.row.get("type")).endswith("Cut")
        if not is_cut and given.row.keys().isdisjoint(("recording", "sources")):
            return None
    check_manifest(path)
    return given.parent, lambda _: LhotseManifest(given.manifest, names, channel)


class _SharLine(NamedTuple):
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

    channel: Channel | None
    """As for `LhotseManifest`."""

    def entries(self, number: int, item: tuple[int, tuple[str, str]]) -> Iterator[Entry]:  # noqa: ARG002
        """Yields the cuts of a shard, in the order of its tar.

        Raises:
            ManifestError: A cut cannot be parsed, or the tar does not exist.
            StorageError: A file cannot be read.
        """
        index, (cuts, tar) = item
        lines: dict[str, _SharLine] = {}
        for position, content in numbered_lines(cuts):
            row = parse_object(content, f"{cuts}:{position}")
            if row is None:
                continue
            cut_id = row.get("id")
            if not isinstance(cut_id, str) or not cut_id:
                raise ManifestError(f"{cuts}:{position}: the id is {cut_id!r}. Give a string.")
            line = _SharLine(entry_number(index, position), cut_id, row)
            if lines.setdefault(cut_id, line) is not line:
                detail = f"an earlier line of {cuts} has the same id"
                yield self._rejected(line, Unusable("duplicate_id", detail))
        with open_shard(tar) as shard:
            yield from self._in_tar(lines, shard)

    def _in_tar(self, lines: dict[str, _SharLine], shard: OpenShard) -> Iterator[Entry]:
        """Yields the entry of each line, with its audio if the next member is its recording."""
        location = shard.info.location
        audio: tuple[_SharLine, Member | Unusable] | None = None
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

    def _entry(self, line: _SharLine, metadata: bytes, member: Member, name: str) -> Entry:
        where = self.where(line.number)
        with _refused_by_lhotse(f"{where}: not a cut with the recording {name}", "Write the shard again."):
            recording = json.loads(metadata)
            cut = _parse_cut(_without_fields(line.row) | {"recording": recording}, where, self.channel)
        if isinstance(cut, Unusable):
            return self._rejected(line, cut)
        return Entry(where, line.cut_id, LhotseCut(cut, member), number=line.number)

    def _rejected(self, line: _SharLine, problem: Unusable) -> Entry:
        return Entry(self.where(line.number), line.cut_id, problem, number=line.number)


def open_shar(given: GivenInput) -> Opened | None:
    """Opens a folder of numbered manifests, each beside its tar."""
    shards = _shards_in(given)
    if not shards and given.format is None:
        return None
    if not shards:
        raise ManifestError(f"{given.folder}: no cuts.000000.jsonl.gz or the like. Give the folder that holds them.")
    return given.location, lambda _: SharDirectory(given.folder, shards, given.options.channel)


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


@contextmanager
def _refused_by_lhotse(problem: str, remedy: str) -> Iterator[None]:
    """Turns an error of Lhotse's constructors, which may be of any kind, into a ManifestError."""
    try:
        yield
    except ManifestError:
        raise
    except Exception as error:
        raise ManifestError(f"{problem} ({in_one_line(error)}). {remedy}") from error


def _parse_cut(row: dict[str, Any], where: str, channel: Channel | None) -> dict[str, Any] | Unusable:
    """Returns the dict of a MonoCut, completed and checked by Lhotse, or why its audio cannot be used; modifies `row`.

    Args:
        row: A cut or a recording.
        where: Its position, for messages.
        channel: The channel that the caller asks for; see `LhotseManifest`.
    """
    from lhotse import MonoCut

    kind = row.pop("type", "Recording" if "sources" in row else "MonoCut")
    if kind not in ("MonoCut", "Cut", "Recording"):
        raise ManifestError(
            f"{where}: a {kind} where a MonoCut was expected. Reduce it to cuts of one channel in Lhotse first."
        )
    if kind == "Recording":
        whole = {"start": 0.0, "duration": row.get("duration"), "channel": 0 if channel in (None, "mix") else channel}
        row = {"id": row.get("id"), **whole, "recording": row}
        if channel == "mix":
            row["custom"] = {MIX_FIELD: "mix"}
    _check_cut(row, where)
    if channel is not None:
        row = _in_channel(row, channel)
    if problem := _problem_of_transforms(row["recording"], where):
        return Unusable("transform", problem)
    cut = dict(MonoCut.from_dict(row).to_dict())
    _check_recording(cut, where)
    cut["start"] = float(cut["start"])  # Lhotse's writers set the integer 0
    for label in cut["supervisions"]:
        label |= {key: label_text(label[key]) for key in ("text", "language", "speaker") if key in label}
        for key in [key for key, value in label.items() if value is None]:
            del label[key]
        if "alignment" in label:  # holds named tuples, which orjson does not write
            label["alignment"] = {kind: [*map(list, items)] for kind, items in label["alignment"].items()}
    return cut


def _check_cut(row: dict[str, Any], where: str) -> None:
    if not isinstance(row.get("id"), str) or not row["id"]:
        raise ManifestError(f"{where}: the id is {row.get('id')!r}. Give a string.")
    if not row.get("recording"):
        raise ManifestError(f"{where}: the cut has no recording. Add it, or drop this line.")
    for key in ("start", "duration"):
        if _seconds(row, key, where) is None:
            raise ManifestError(f"{where}: the cut has no {key}. Add it, or drop this line.")


def _in_channel(row: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Returns a cut with the channel that the caller asks for; its id says so, if it had another one."""
    custom = {key: value for key, value in (row.get("custom") or {}).items() if key != MIX_FIELD}
    if channel == "mix":
        custom[MIX_FIELD] = "mix"
    number = 0 if channel == "mix" else channel
    if (row.get("channel"), is_mixed(row)) == (number, channel == "mix"):
        return row
    cut_id = f"{row['id']}@{'mix' if channel == 'mix' else f'ch{channel}'}"
    labels = [{**label, "channel": number} for label in row.get("supervisions") or ()]
    return {**row, "id": cut_id, "channel": number, "custom": custom, "supervisions": labels}


def _check_recording(cut: dict[str, Any], where: str) -> None:
    """Checks the values that Lhotse does not validate."""
    recording = cut["recording"]
    numbers = {key: recording.get(key) for key in ("sampling_rate", "num_samples")} | {"channel": cut.get("channel")}
    for key, value in numbers.items():
        if type(value) is not int or not (key == "sampling_rate") <= value < 1 << 50:
            raise ManifestError(f"{where}: {key} is {value!r}. Fix this line.")
    if _seconds(recording, "duration", where) is None:
        raise ManifestError(f"{where}: the recording has no duration. Add it, or drop this line.")
    for source in recording["sources"]:
        channels = source.get("channels")
        if not isinstance(channels, list) or not all(type(channel) is int for channel in channels):
            raise ManifestError(f"{where}: the channels of a source are {channels!r}. Give a list of numbers.")


def _problem_of_transforms(recording: Any, where: str) -> str:
    """Returns why transforms cannot be applied; empty if they can. Lhotse, which builds them next, does not say why.

    Raises:
        ManifestError: A package is missing.
    """
    transforms, rate = recording.get("transforms"), recording.get("sampling_rate")
    if not transforms or type(rate) is not int:
        return ""
    from nestdata.audio.lhotse_audio import check_transforms  # imports numpy

    try:
        check_transforms(transforms, rate)
    except ConfigError as error:
        raise ManifestError(f"{where}: {error}") from None
    except ValueError as error:
        return str(error)
    return ""


def _seconds(row: dict[str, Any], key: str, where: str) -> float | None:
    """Returns a value in seconds, or None if the key is missing or null.

    Raises:
        ManifestError: The value is not a number, is negative, or is too large.
    """
    value = row.get(key)
    if value is None:
        return None
    if not is_number(value, MAX_SECONDS):
        raise ManifestError(f"{where}: {key} is {value!r}. Give seconds as a number from 0 to {MAX_SECONDS:g}.")
    return float(value)
