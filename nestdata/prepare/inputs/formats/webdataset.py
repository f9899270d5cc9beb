"""WebDataset: tars in which the members of a sample share a name up to its first dot, the key.

Source: webdataset 1.0, `tariterators.py`, which takes only members that follow each other as a sample; here, members of
a key are joined wherever they are in the tar. The key, with its folders, is the id of the cut. Indexes of `wids`, which
may be pickles, are never opened.
"""

import json
import os
import posixpath
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nestdata.errors import ManifestError, StorageError
from nestdata.prepare.inputs.audio import Member, Unusable
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, MAIN_SUFFIXES, Entry, cut_id_of
from nestdata.prepare.inputs.format import TAR, Format, GivenInput, Opened
from nestdata.prepare.inputs.lines import open_lines
from nestdata.prepare.inputs.listing import objects_below
from nestdata.prepare.inputs.patterns import check_shards, expand, folder_of
from nestdata.prepare.inputs.shard import OpenShard, damage, entry_number, open_shard, shard_and_position, unsafe
from nestdata.prepare.inputs.tar import TarError, TarMember, plain_name, stem_and_suffix
from nestdata.storage import is_url, join, name_of, parent, storage

_KEY = re.compile(r"((?:.*/)?[^./]+)\.[^/]*")
# Members about the archive rather than a sample.
_ABOUT_ARCHIVE = re.compile(r"__[^/]*__(?:$|/)")
_NOT_LABELS = frozenset({"audio_filepath", "audio_filename", "offset", "duration"})
# Labels are some hundred bytes; longer ones are not read.
_MAX_LABELS = 1 << 20
# Bytes of members that wait for the audio of their key, and what is added for each of them.
_MAX_WAITING, _PART_BYTES = 64 << 20, 512


class _Part(NamedTuple):
    """A member of a sample."""

    name: str
    key: str
    suffix: str
    audio: Member | Unusable | None
    """The audio; None for other members."""

    content: bytes
    """The labels; empty for other members."""


@dataclass(frozen=True, slots=True)
class WebDataset:
    """The samples of tars that have audio, with the values of `.json` and the text of `.txt` as labels."""

    items_per_task: ClassVar[int] = 1
    path: Path | str
    tars: tuple[str, ...] = field(repr=False)  # each item names the tars that it reads
    """Absolute paths or URLs."""

    folder: str
    """Absolute path or URL that keys are relative to: the folder of the tars."""

    root: str

    def items(self) -> Iterator[tuple[int, str]]:
        """Yields the tars with their indices."""
        yield from enumerate(self.tars)

    def entries(self, number: int, item: tuple[int, str]) -> Iterator[Entry]:  # noqa: ARG002, entries have their own
        """Yields the samples of a tar.

        Raises:
            ManifestError: The tar does not exist.
            StorageError: The tar cannot be read.
        """
        index, tar = item
        position, waiting = 0, _Waiting()
        keys_with_audio = array("q")  # their hashes: 8 bytes for a sample
        with open_shard(tar) as shard:
            parts = _Parts(shard)
            for position, key, sample in parts.runs():
                if any(part.audio for part in sample):
                    keys_with_audio.append(hash(key))
                    yield self._entry(index, position, tar, key, [*waiting.joined(key), *sample])
                elif not waiting.add(key, position, sample):
                    detail = f"no audio beside {_names(sample)}, and too many members to join them; sort them by name"
                    yield self._rejected(index, position, tar, key, Unusable("no_such_member", detail))
        if not waiting.keys.isdisjoint(keys_with_audio):
            yield from self._joined_late(index, shard, waiting)
        for key, (first, sample) in waiting.left():
            detail = f"a sample without audio: {_names(sample)}"
            yield self._rejected(index, first, tar, key, Unusable("no_such_member", detail))
        if parts.problem:
            yield Entry(tar, "", parts.problem, number=entry_number(index, position + 1))

    def files(self, item: tuple[int, str]) -> list[str]:
        """Returns the tar."""
        return [item[1]]

    def where(self, number: int) -> str:
        """Returns the tar and the number of the sample in it, counted from 1."""
        index, sample = shard_and_position(number)
        return f"{self.tars[index]} (sample {sample})"

    def count(self) -> int | None:
        """Returns the number of tars."""
        return len(self.tars)

    def _joined_late(self, index: int, shard: OpenShard, waiting: "_Waiting") -> Iterator[Entry]:
        """Reads a tar once more, and yields the samples again that have members behind their audio."""
        tar = shard.info.location
        with open_shard(tar) as again:
            if again.info != shard.info:
                raise StorageError.because("changed", f"{tar}: it was written to while it was read. Prepare again.")
            for position, key, sample in _Parts(again).runs():
                if hash(key) in waiting.keys and any(part.audio for part in sample):
                    yield self._entry(index, position, tar, key, [*sample, *waiting.joined(key)])

    def _rejected(self, index: int, position: int, tar: str, key: str, problem: Unusable) -> Entry:
        cut_id = cut_id_of(join(self.folder, posixpath.normpath(key)) + ".", self.root)
        return Entry(f"{tar}: {key}", cut_id, problem, number=entry_number(index, position))

    def _entry(self, index: int, position: int, tar: str, key: str, sample: list[_Part]) -> Entry:
        audio, labels = _audio(sample), None
        if isinstance(audio, Member):
            try:
                labels = _labels(sample)
            except (ValueError, RecursionError) as error:
                audio = Unusable("unreadable", f"labels that are not JSON ({error}): {_names(sample)}")
        if isinstance(audio, Unusable):
            return self._rejected(index, position, tar, key, audio)
        cut_id = cut_id_of(join(self.folder, posixpath.normpath(key)) + ".", self.root)
        return Entry(f"{tar}: {key}", cut_id, audio, labels=labels, number=entry_number(index, position))


def check_not_nemo(given: GivenInput) -> None:
    """Raises ManifestError if a folder holds tars and a manifest, as NeMo writes them, and no audio beside them."""
    manifests = [name for name in given.children if "manifest" in name_of(name)]
    has_audio = any(name.lower().endswith(AUDIO_SUFFIXES) for name in given.children)
    if manifests and not has_audio and any(TAR.fullmatch(name) for name in given.children):
        raise ManifestError(
            f"{given.folder}: tars beside {name_of(manifests[0])}, as NeMo writes them. Give a manifest, or "
            "--format webdataset to read the tars without one."
        )


def _open(given: GivenInput) -> Opened:
    tars = _tars_of(given)
    check_shards(tars, str(given.folder))
    folder = folder_of(tars)
    return folder, lambda root: WebDataset(given.folder, tuple(tars), folder, root)


FORMAT = Format("webdataset", lambda given: given.kind == "tars", _open)


def _tars_of(given: GivenInput) -> list[str]:
    """Returns the tars of an input: those of a pattern, of a list of tars, or in a folder and its subfolders."""
    if given.is_tars:
        return given.names
    if isinstance(given.path, Path) and given.path.is_file():
        return _listed(given.path)
    given.check_folder()
    folder = given.location
    found = objects_below(folder) if is_url(folder) else storage().list_objects(folder)
    tars = [info.location for info in found if TAR.fullmatch(info.location)]
    if not tars:
        raise ManifestError(f"{given.folder}: no tars in this folder or its subfolders.")
    return tars


def _listed(path: Path) -> list[str]:
    """Returns the tars that a text file lists, relative to its folder."""
    location = os.path.abspath(path)
    with open_lines(path) as file:
        names = [line.decode(errors="surrogateescape").strip() for line in file]
    tars = [name for text in names if text for name in expand(join(parent(location), text))]
    wrong = next((name for name in tars if not TAR.fullmatch(name)), None)
    if not tars or wrong:
        raise ManifestError(f"{location}: not a list of tars, one in a line{f': {wrong!r}' if wrong else ''}. Fix it.")
    return tars


class _Waiting:
    """Members without audio beside them, which are kept for the audio of their key."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        """Hashes of the keys with members that are not joined."""

        self._samples: dict[str, tuple[int, list[_Part]]] = {}
        self._num_bytes = 0

    def add(self, key: str, position: int, sample: list[_Part]) -> bool:
        """Adds members, given the position of the first; returns whether there was memory for them."""
        num_bytes = sum(len(part.name) + len(part.content) + _PART_BYTES for part in sample)
        if self._num_bytes + num_bytes > _MAX_WAITING:
            return False
        self._num_bytes += num_bytes
        self._samples.setdefault(key, (position, []))[1].extend(sample)
        self.keys.add(hash(key))
        return True

    def joined(self, key: str) -> list[_Part]:
        """Returns the members of a key, whose audio has been found."""
        if key not in self._samples:
            return []
        self.keys.discard(hash(key))
        return self._samples[key][1]

    def left(self) -> Iterator[tuple[str, tuple[int, list[_Part]]]]:
        """Yields the keys that are not joined, with the position of their first member and all members."""
        return ((key, sample) for key, sample in self._samples.items() if hash(key) in self.keys)


class _Parts:
    """The members of a tar that belong to samples, and why its end was not reached."""

    def __init__(self, shard: OpenShard) -> None:
        self.problem: Unusable | None = None
        self._shard = shard

    def runs(self) -> Iterator[tuple[int, str, list[_Part]]]:
        """Yields consecutive members of one key, with their position, counted from 1."""
        for position, (key, run) in enumerate(groupby(self._parts(), lambda part: part.key), start=1):
            yield position, key, [*run]

    def _parts(self) -> Iterator[_Part]:
        try:
            for found in self._shard.members():
                if part := self._part(found):
                    yield part
        except TarError as error:
            self.problem = damage(error, self._shard.info.location)

    def _part(self, found: TarMember) -> _Part | None:
        name = plain_name(found.name)
        match = None if _ABOUT_ARCHIVE.match(name) else _KEY.fullmatch(name)
        if match is None:
            return None
        suffix = stem_and_suffix(name)[1]
        if found.problem:
            return _Part(name, match[1], suffix, unsafe(found, self._shard.info.location), b"")
        if suffix in AUDIO_SUFFIXES:
            return _Part(name, match[1], suffix, self._shard.member(found), b"")
        is_label = suffix in (".json", ".txt") and found.size <= _MAX_LABELS
        return _Part(name, match[1], suffix, None, self._shard.read(found) if is_label else b"")


def _audio(sample: Sequence[_Part]) -> Member | Unusable:
    """Returns the audio of a sample with audio, or why there is not exactly one file that may be used."""
    found = [(part.audio, part.suffix) for part in sample if part.audio]
    if unsafe_member := next((audio for audio, _ in found if isinstance(audio, Unusable)), None):
        return unsafe_member
    if len(found) > 1:  # a video beside its sound is not a second recording
        found = [(audio, suffix) for audio, suffix in found if suffix in MAIN_SUFFIXES] or found
    if len(found) > 1:
        detail = f"a sample with several audio files, since a key ends at the first dot: {_names(sample)}"
        return Unusable("ambiguous_member", detail)
    return found[0][0]


def _names(sample: Iterable[_Part]) -> str:
    return ", ".join(part.name for part in sample)


def _labels(sample: Iterable[_Part]) -> dict[str, Any]:
    """Returns the labels of a sample.

    Raises:
        ValueError, RecursionError: A member with the suffix `.json` is not JSON, or is nested too deep.
    """
    labels: dict[str, Any] = {}
    for part in sample:
        if part.suffix == ".json" and part.content:
            values = json.loads(part.content)
            if isinstance(values, dict):
                labels |= {key: value for key, value in values.items() if key not in _NOT_LABELS}
        elif part.suffix == ".txt":
            labels["text"] = part.content.decode(errors="replace").strip()
    return labels
