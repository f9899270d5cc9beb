"""WebDataset: tars in which the members of a sample follow each other and share a name up to its first dot.

Source: webdataset 1.0, `tariterators.py`. The key of a sample, with its folders, is the id of the cut. Indexes of
`wids`, which may be pickles, are never opened.
"""

import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.audio import Member, Unusable
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Entry, cut_id_of
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

    def entries(self, number: int, item: tuple[int, str]) -> Iterator[Entry]:
        """Yields the samples of a tar.

        Raises:
            ManifestError: The tar does not exist.
            StorageError: The tar cannot be read.
        """
        index, tar = item
        position = 0
        problem: Unusable | None = None
        with open_shard(tar) as shard:
            parts = _Parts(shard)
            for position, (key, sample) in enumerate(groupby(parts, lambda part: part.key), start=1):
                number = entry_number(index, position)
                yield self._entry(number, f"{tar}: {key}", key, list(sample))
            problem = parts.problem
        if problem:
            number = entry_number(index, position + 1)
            yield Entry(tar, "", problem, number=number)

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

    def _entry(self, number: int, where: str, key: str, sample: list[_Part]) -> Entry:
        cut_id = cut_id_of(join(self.folder, posixpath.normpath(key)) + ".", self.root)
        audio, labels = _audio(sample), None
        if isinstance(audio, Member):
            try:
                labels = _labels(sample)
            except (ValueError, RecursionError) as error:
                audio = Unusable("unreadable", f"labels that are not JSON ({error}): {_names(sample)}")
        return Entry(where, cut_id, audio, labels=labels, number=number)


def _detect(given: GivenInput) -> bool:
    if given.kind == "tars":
        return True
    if given.kind != "folder" or not any(TAR.fullmatch(name) for name in given.children):
        return False
    if any(name.lower().endswith(AUDIO_SUFFIXES) for name in given.children):
        return False
    manifests = [name for name in given.children if "manifest" in name_of(name)]
    if manifests:
        raise ManifestError(
            f"{given.folder}: tars beside {name_of(manifests[0])}, as NeMo writes them. Give a manifest, or "
            "--format webdataset to read the tars without one."
        )
    return True


def _open(given: GivenInput) -> Opened:
    tars = _tars_of(given)
    check_shards(tars, str(given.folder))
    folder = folder_of(tars)
    return folder, lambda root: WebDataset(given.folder, tuple(tars), folder, root)


FORMAT = Format("webdataset", _detect, _open)


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


class _Parts:
    """The members of a tar that belong to samples, and why its end was not reached."""

    def __init__(self, shard: OpenShard) -> None:
        self.problem: Unusable | None = None
        self._shard = shard

    def __iter__(self) -> Iterator[_Part]:
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
    """Returns the audio of a sample, or why there is not exactly one file that may be used."""
    found = [part.audio for part in sample if part.audio]
    if unsafe_member := next((audio for audio in found if isinstance(audio, Unusable)), None):
        return unsafe_member
    if not found:
        return Unusable("no_such_member", f"a sample without audio: {_names(sample)}")
    if len(found) > 1:
        detail = f"a sample with several audio files, since a key ends at the first dot: {_names(sample)}"
        return Unusable("ambiguous_member", detail)
    return found[0]


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
