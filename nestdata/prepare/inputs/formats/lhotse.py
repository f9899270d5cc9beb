"""Lhotse's cuts and recordings: manifests of one JSON object per line, corpora, which have such lines, and objects."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import orjson

from nestdata.audio.channels import MIX_FIELD, Channel, is_mixed
from nestdata.errors import ConfigError, ManifestError, StorageError, in_one_line
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.audio import File, LhotseCut, Member, Unusable, unusable_command
from nestdata.prepare.inputs.entry import MAX_SECONDS, Entry
from nestdata.prepare.inputs.format import Format, GivenInput, Opened
from nestdata.prepare.inputs.given import is_corpus
from nestdata.prepare.inputs.lines import LineSource, Manifest, check_manifest, parse_object
from nestdata.prepare.inputs.meaning import label_text
from nestdata.prepare.inputs.patterns import object_info
from nestdata.prepare.inputs.rows import FileNames, is_number
from nestdata.prepare.inputs.tar import member_at
from nestdata.storage import is_url, storage

_CORPUS_FILES = ("meta.json", "index.npy", "cuts.jsonl")
# Pointers of Lhotse 2 to members of tars, as `cuts.jsonl` has them as well. END is the header of the next sample, and
# is not needed beside the header at START. With s=1, Lhotse does not search the tar for a NAME that is elsewhere.
_POINTER = re.compile(r"(?P<tar>[^?]+)\?o=(?P<start>\d{1,18})&e=\d{1,18}(&n=(?P<name>[^&]*)(&s=1)?)?")


@dataclass(frozen=True, slots=True)
class LhotseManifest(LineSource):
    """Lhotse MonoCuts or recordings; a recording becomes one cut."""

    format: ClassVar[InputFormat] = "lhotse"
    holds_objects: ClassVar[bool] = True
    manifest: Manifest
    names: FileNames
    """Relative paths start from the current directory, as in Lhotse, or from the folder of the manifest."""

    channel: Channel | None
    """Channel that the caller asks for; None for the channel of a cut, and for the first one of a recording."""

    def entries(self, number: int, item: bytes) -> Iterator[Entry]:
        """Yields the entry of a line; none for a blank one."""
        where = self.where(number)
        row = parse_object(item, where)
        if row is None:
            return
        try:
            cut = self.parse_cut(row, where)
        except ManifestError:
            raise
        except Exception as error:  # Lhotse's constructors raise errors of many kinds
            raise ManifestError(
                f"{where}: not a Lhotse cut or recording ({in_one_line(error)}). Fix this line."
            ) from error
        if isinstance(cut, Unusable):
            yield Entry(where, row["id"], cut)
            return
        hint = ""
        for source in cut["recording"]["sources"]:
            kind, location = source.get("type"), source.get("source")
            if kind not in ("file", "url", "shar_ptr", "command") or not isinstance(location, str):
                raise ManifestError(
                    f"{where}: a source of type {kind!r}, which is not supported. Write the audio "
                    "to files in Lhotse first, with `CutSet.save_audios`."
                )
            if kind == "file":
                file = self.names.file(location)
                source["source"], hint = file.location, file.hint
                if is_url(file.location):
                    source["type"] = "url"
        found = self._located(cut)
        yield Entry(where, cut["id"], found if isinstance(found, Unusable) else LhotseCut(cut, found, hint=hint))

    def parse_cut(self, row: dict[str, Any], where: str) -> dict[str, Any] | Unusable:
        """Returns the dict of a MonoCut, completed and checked by Lhotse, or why its audio is not; modifies `row`."""
        from lhotse import MonoCut

        kind = row.pop("type", "Recording" if "sources" in row else "MonoCut")
        if kind not in ("MonoCut", "Cut", "Recording"):
            raise ManifestError(
                f"{where}: a {kind} where a MonoCut was expected. Reduce it to cuts of one channel in Lhotse first."
            )
        if kind == "Recording":
            channel = 0 if self.channel in (None, "mix") else self.channel
            whole = {"start": 0.0, "duration": row.get("duration"), "channel": channel}
            row = {"id": row.get("id"), **whole, "recording": row}
            if self.channel == "mix":
                row["custom"] = {MIX_FIELD: "mix"}
        _check_cut(row, where)
        if self.channel is not None:
            row = _in_channel(row, self.channel)
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
            if error.kind not in ("missing", "changed"):
                raise
            found = Unusable(error.kind, str(error))
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
        return lambda _: CorpusCuts(_cuts_in(given.path), names, channel, root=given.root)
    return lambda _: LhotseObjects(Manifest(type(given).__name__, False), names, channel, cuts=given)


def _cuts_in(corpus: Path) -> Manifest:
    return Manifest(corpus / "cuts.jsonl", False)


def _is_corpus_folder(given: GivenInput) -> bool:
    return (
        given.format is None
        and isinstance(given.path, Path)
        and given.kind == "folder"
        and all(given.has_file(name) for name in _CORPUS_FILES)
    )


def _detect(given: GivenInput) -> bool:
    if given.kind != "manifest":
        return _is_corpus_folder(given)
    return str(given.row.get("type")).endswith("Cut") or "recording" in given.row or "sources" in given.row


def _open(given: GivenInput) -> Opened:
    if isinstance(given.path, str):
        names = FileNames((given.parent,), given.parent)
    else:
        names = FileNames.of((), (os.getcwd(), given.parent), os.getcwd())
    if _is_corpus_folder(given):
        return given.location, lambda _: CorpusCuts(_cuts_in(Path(given.path)), names, given.options.channel)
    check_manifest(given.path)
    return given.parent, lambda _: LhotseManifest(given.manifest, names, given.options.channel)


FORMAT = Format(_detect, _open)


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
