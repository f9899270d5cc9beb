"""WebDataset: tars in which the members of a sample share a name up to its first dot, the key.

Source: webdataset 1.0, `tariterators.py`, which takes only members that follow each other as a sample; here, members of
a key are joined wherever they are in the tar. The key, with its folders, is the id of the cut. Indexes of `wids`, which
may be pickles, are never opened.
"""

import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nestdata.columns import Column
from nestdata.errors import ManifestError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import AUDIO_KEYS, AUDIO_SUFFIXES, MAIN_SUFFIXES, Entry, Member, Unusable
from nestdata.prepare.inputs.format import GivenInput, Opened
from nestdata.prepare.inputs.patterns import TAR, check_shards, folder_of, objects_below
from nestdata.prepare.inputs.rows import cut_id_of, meaning_in, placed
from nestdata.prepare.inputs.tar import (
    ShardSource,
    TarMember,
    entry_number,
    open_shard,
    plain_name,
    stem_and_suffix,
)
from nestdata.storage import is_url, join, name_of, storage

_KEY = re.compile(r"((?:.*/)?[^./]+)\.[^/]*", re.DOTALL)
# Members about the archive rather than a sample.
_ABOUT_ARCHIVE = re.compile(r"__[^/]*__(?:$|/)")
_NOT_LABELS = frozenset({*AUDIO_KEYS, "offset", "duration"})
_AUDIO = frozenset(AUDIO_SUFFIXES)
_LABEL_SUFFIXES = (".json", ".txt")
# Labels are some hundred bytes; longer ones are not read.
_MAX_LABELS = 1 << 20
# Members of a sample that come in several places of a tar. With more, it is rejected: its key ends too early.
_MAX_SCATTERED = 64


@dataclass(frozen=True, slots=True)
class WebDataset(ShardSource):
    """The samples of tars that have audio; the values of `.json` and the text of `.txt` are the row of a sample."""

    format: ClassVar[InputFormat] = "webdataset"
    path: Path | str
    shards: tuple[tuple[str], ...] = field(repr=False)  # each item names the tar that it reads
    folder: str
    """Absolute path or URL that keys are relative to: the folder of the tars."""

    root: str
    columns: tuple[Column, ...] = ()

    @classmethod
    def of(cls, path: Path | str, tars: Sequence[str], root: str, columns: tuple[Column, ...]) -> "WebDataset":
        """Returns the source of tars, given their absolute paths or URLs."""
        return cls(path, tuple((tar,) for tar in tars), folder_of(tars), root, columns)

    def entries(self, number: int, item: tuple[int, tuple[str]]) -> Iterator[Entry]:  # noqa: ARG002, keys are numbered
        """Yields the samples of a tar; yields a sample again if further members of it come later.

        Raises:
            ManifestError: The tar does not exist.
            StorageError: The tar cannot be read.
        """
        index, (tar,) = item
        samples: dict[str, _Sample] = {}  # by key
        with open_shard(tar) as shard:
            for key, run in groupby(shard.members(), _key_of):
                if not key:
                    continue
                sample = samples.setdefault(key, _Sample(entry_number(index, len(samples) + 1)))
                new = [(found, _part(found, shard.member)) for found in run]
                comes_again = bool(sample.members)
                if sample.is_scattered or (comes_again and all(part.member is None for _, part in new)):
                    continue
                parts = [_part(found, shard.address) for found in sample.members] + [part for _, part in new]
                sample.members += [found for found, _ in new]
                sample.is_scattered = comes_again and len(parts) > _MAX_SCATTERED
                if sample.is_scattered:
                    sample.is_yielded = True
                    names = ", ".join(part.name for part in parts[:8])
                    detail = f"more than {_MAX_SCATTERED} members in several places, since a key ends at the first dot"
                    yield self._entry(sample.number, tar, key, Unusable("ambiguous_member", f"{detail}: {names}, ..."))
                elif any(part.decides for part in parts):
                    sample.is_yielded = True
                    yield self._entry(sample.number, tar, key, *_joined(parts))
        for key, sample in samples.items():
            if not sample.is_yielded:
                names = ", ".join(plain_name(found.name) for found in sample.members)
                missing = Unusable("no_such_member", f"a sample without audio: {names}")
                yield self._entry(sample.number, tar, key, missing)
        if shard.problem:
            yield Entry(tar, "", shard.problem, number=entry_number(index, len(samples) + 1))

    def _entry(
        self, number: int, tar: str, key: str, audio: Member | Unusable, row: dict[str, Any] | None = None
    ) -> Entry:
        cut_id = cut_id_of(join(self.folder, posixpath.normpath(key)) + ".", self.root)
        if not row:
            return Entry(f"{tar}: {key}", cut_id, audio, labels=row, number=number)
        where = f"{tar}: {key}"
        meaning = meaning_in(row, where, self.columns, is_embedded=True)
        labels = {name: value for name, value in meaning.labels_of(row).items() if name not in _NOT_LABELS}
        return placed(where, cut_id, audio, row, meaning, labels, number)


def check_not_nemo(given: GivenInput) -> None:
    """Raises ManifestError if a folder holds tars and a manifest, as NeMo writes them, and no audio beside them."""
    manifests = [name for name in given.children if "manifest" in name_of(name)]
    has_audio = any(name.lower().endswith(AUDIO_SUFFIXES) for name in given.children)
    if manifests and not has_audio and any(TAR.fullmatch(name) for name in given.children):
        raise ManifestError(
            f"{given.folder}: tars beside {name_of(manifests[0])}, as NeMo writes them. Give a manifest, or "
            "--format webdataset to read the tars without one."
        )


def open_tars(given: GivenInput) -> Opened:
    """Opens a tar or a pattern of tars; a folder of them if the caller knows the format."""
    tars = _tars_of(given)
    check_shards(tars, str(given.folder))
    return folder_of(tars), lambda root: WebDataset.of(given.folder, tars, root, given.options.columns)


def _tars_of(given: GivenInput) -> list[str]:
    """Returns the tars of an input, which is a pattern, or a folder with its subfolders."""
    if given.is_tars:
        return given.names
    given.check_folder()
    folder = given.location
    found = objects_below(folder) if is_url(folder) else storage().list_objects(folder)
    tars = [info.location for info in found if TAR.fullmatch(info.location)]
    if not tars:
        raise ManifestError(f"{given.folder}: no tars in this folder or its subfolders.")
    return tars


def _key_of(found: TarMember) -> str:
    """Returns the key of a member; empty if it belongs to no sample."""
    name = plain_name(found.name)
    match = None if _ABOUT_ARCHIVE.match(name) else _KEY.fullmatch(name)
    return match[1] if match else ""


@dataclass(slots=True)
class _Sample:
    """The members of a key so far."""

    number: int
    """Number of the entry."""

    members: list[TarMember] = field(default_factory=list)
    is_yielded: bool = False
    """Whether it has audio, or is rejected."""

    is_scattered: bool = False
    """Whether it is rejected whatever members follow."""


class _Part(NamedTuple):
    """A member of a sample."""

    name: str
    suffix: str
    member: Member | Unusable | None
    """Audio and labels; None for other members."""

    decides: bool
    """Whether the sample is used or rejected because of this member: it is audio, or must not be used."""


def _part(found: TarMember, member_of: Callable[[TarMember], Member | Unusable]) -> _Part:
    name = plain_name(found.name)
    suffix = stem_and_suffix(name)[1]
    decides = bool(found.problem) or suffix in _AUDIO
    is_label = suffix in _LABEL_SUFFIXES and found.size <= _MAX_LABELS
    return _Part(name, suffix, member_of(found) if decides or is_label else None, decides)


def _joined(parts: Sequence[_Part]) -> tuple[Member | Unusable, dict[str, Any] | None]:
    """Returns the audio of a sample, or why there is not exactly one file that may be used, and its row."""
    names = ", ".join(part.name for part in parts)
    audio = [part for part in parts if part.decides]
    unusable = next((part.member for part in audio if isinstance(part.member, Unusable)), None)
    if len(audio) > 1:  # a video beside its sound is not a second recording
        audio = [part for part in audio if part.suffix in MAIN_SUFFIXES] or audio
    found = audio[0].member
    if unusable or not isinstance(found, Member):
        return unusable or Unusable("no_such_member", names), None
    if len(audio) > 1:
        detail = f"a sample with several audio files, since a key ends at the first dot: {names}"
        return Unusable("ambiguous_member", detail), None
    try:
        return found, _row(parts)
    except (ValueError, RecursionError) as error:
        return Unusable("unreadable", f"labels that are not JSON ({error}): {names}"), None


def _row(parts: Iterable[_Part]) -> dict[str, Any]:
    """Returns what the members of a sample say of its audio, by name.

    Raises:
        ValueError, RecursionError: A member with the suffix `.json` is not JSON, or is nested too deep.
    """
    row: dict[str, Any] = {}
    for part in parts:
        if part.decides or not isinstance(part.member, Member):
            continue
        content = part.member.read()
        if part.suffix == ".txt":
            row["text"] = content.decode(errors="replace").strip()
        elif content and isinstance(values := json.loads(content), dict):
            row |= values
    return row
