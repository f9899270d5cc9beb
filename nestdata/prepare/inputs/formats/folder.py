"""A folder: its audio files, tars and Parquet files, and those of its subfolders; all other files are counted."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.audio import File
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, MAIN_SUFFIXES, Entry, Source, cut_id_of
from nestdata.prepare.inputs.format import TAR, Format, GivenInput, Opened
from nestdata.prepare.inputs.formats.parquet import PARQUET_SUFFIX, parquet_beside_audio, parquet_in_folder
from nestdata.prepare.inputs.formats.webdataset import WebDataset, check_not_nemo
from nestdata.prepare.inputs.listing import cannot_be_listed, objects_below
from nestdata.prepare.inputs.patterns import folder_of
from nestdata.prepare.inputs.remote import whole_object
from nestdata.storage import ObjectInfo

_AUDIO, _MAIN = frozenset(AUDIO_SUFFIXES), frozenset(MAIN_SUFFIXES)
# What other files are counted by. Names come from outside, so that suffixes are short, and few are told apart.
_SUFFIX = re.compile(r"\.\w{1,12}")
_HIDDEN, _WITHOUT_SUFFIX, _OTHER = "hidden", "without suffix", "other"
_MAX_KINDS = 100
# Copies of the attributes of files that macOS makes: the folder in archives, and the prefix elsewhere.
_MACOS_FOLDER, _MACOS_PREFIX = "__MACOSX", "._"


@dataclass(frozen=True, slots=True)
class AudioFolder:
    """Audio files sorted by name; the files of a folder come before those of its subfolders.

    Of the files of a folder, those with one of `MAIN_SUFFIXES` come first. Symbolic links are followed, but no folder
    is read twice, even if several links lead to it.
    """

    items_per_task: ClassVar[None] = None
    path: Path
    root: str
    num_files: int = field(default=0, repr=False)
    other_files: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Number of files that are not read, by suffix."""

    def items(self) -> Iterator[str]:
        """Yields absolute paths.

        Raises:
            ManifestError: A folder cannot be listed.
        """
        yield from (path for path, kind in _files(os.path.abspath(self.path), set()) if kind == "audio")

    def entries(self, number: int, item: str) -> Iterator[Entry]:  # noqa: ARG002, the path is enough
        """Yields the entry of a file."""
        yield Entry(item, cut_id_of(item, self.root), File(item))

    def where(self, number: int) -> str:
        """Returns the path of the folder and the number of the file in it."""
        return f"{self.path} (file {number})"

    def count(self) -> int | None:
        """Returns the number of files that were found when the folder was opened."""
        return self.num_files


@dataclass(frozen=True, slots=True)
class BucketFolder:
    """Audio objects below a URL, in the order in which `AudioFolder` yields files of the same names."""

    items_per_task: ClassVar[None] = None
    path: str
    root: str
    num_files: int = field(default=0, repr=False)
    other_files: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Number of objects that are not read, by suffix."""

    def items(self) -> Iterator[ObjectInfo]:
        """Yields the objects.

        Raises:
            StorageError: The folder cannot be listed.
        """
        yield from sorted_as_files(info for info, kind in _objects(self.path) if kind == "audio")

    def entries(self, number: int, item: ObjectInfo) -> Iterator[Entry]:  # noqa: ARG002, the object is enough
        """Yields the entry of an object."""
        yield Entry(item.location, cut_id_of(item.location, self.root), whole_object(item))

    def where(self, number: int) -> str:
        """Returns the URL of the folder and the number of the object in it."""
        return f"{self.path} (object {number})"

    def count(self) -> int | None:
        """Returns the number of objects."""
        return self.num_files


def sorted_as_files(objects: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Sorts objects so that those of a folder come before those of its subfolders, as `AudioFolder` sorts files."""

    def key(info: ObjectInfo) -> list[tuple[int, str]]:
        *folders, name = info.location.split("/")
        return [*((2, folder) for folder in folders), _order(name)]

    return sorted(objects, key=key)


def other_files(sources: Iterable[Source]) -> dict[str, int]:
    """Returns the number of files in folders that are not read, by suffix, most frequent first."""
    total: Counter[str] = Counter()
    for source in sources:
        if isinstance(source, AudioFolder | BucketFolder):
            total.update(source.other_files)
    return dict(sorted(total.items(), key=lambda pair: (-pair[1], pair[0])))


_Kind = Literal["audio", "tar", "parquet"] | None


@dataclass(slots=True)
class _Contents:
    """What a folder and its subfolders hold."""

    num_audio: int = 0
    tars: list[str] = field(default_factory=list)
    parquet: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)

    def add(self, location: str, kind: _Kind) -> None:
        """Counts a file; keeps the locations of those that hold many recordings."""
        match kind:
            case "audio":
                self.num_audio += 1
            case "tar":
                self.tars.append(location)
            case "parquet":
                self.parquet.append(location)
            case _:
                self.count_other(location)

    def count_other(self, location: str) -> None:
        """Counts a file that is not read."""
        folders, _, name = location.rpartition("/")
        suffix = _suffix(name)
        if name.startswith(".") or _MACOS_FOLDER in folders.split("/"):
            kind = _HIDDEN
        elif not suffix:
            kind = _WITHOUT_SUFFIX
        else:
            kind = suffix if _SUFFIX.fullmatch(suffix) else _OTHER
        self.others[kind if kind in self.others or len(self.others) < _MAX_KINDS else _OTHER] += 1

    def others_text(self) -> str:
        """Returns how many files are not read, in words; empty if there are none."""
        found = ", ".join(f"{number} {kind}" for kind, number in self.others.most_common(10))
        return f"; of other kinds: {found}" if found else ""


def _suffix(name: str) -> str:
    """Returns the lower-case suffix of a file name, with its dot; empty if there is none."""
    begin = name.rfind(".")
    return name[begin:].lower() if begin >= 0 else ""


def _kind(name: str, suffix: str, is_hidden: bool) -> _Kind:
    """Returns how a file is read, given its suffix and whether it is in a folder of macOS; None if it is not."""
    if is_hidden or name.startswith(_MACOS_PREFIX):
        return None
    if suffix in _AUDIO:
        return "audio"
    if suffix == PARQUET_SUFFIX:
        return "parquet"
    return "tar" if TAR.fullmatch(name) else None


def _order(name: str) -> tuple[int, str]:
    return int(_suffix(name) not in _MAIN), name


def _objects(url: str) -> Iterator[tuple[ObjectInfo, _Kind]]:
    for info in objects_below(url):
        *folders, name = info.location.removeprefix(url).split("/")
        yield info, _kind(name, _suffix(name), _MACOS_FOLDER in folders)


def _files(directory: str, seen: set[tuple[int, int]], *, is_hidden: bool = False) -> Iterator[tuple[str, _Kind]]:
    """Yields the paths of all files and how they are read, in an order that does not depend on the file system.

    Holds the names of one folder at a time. Skips folders whose device and inode are in `seen`, and adds those that it
    reads.
    """
    try:
        status = os.stat(directory)
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(directory) as entries:
            listed = [(_is_folder(entry), entry.name) for entry in entries]
    except OSError as error:
        raise cannot_be_listed(directory, error) from error
    inside = directory if directory.endswith("/") else directory + "/"
    main: list[str] = []
    others: list[str] = []
    for is_folder, name in listed:
        if not is_folder:
            (main if _suffix(name) in _MAIN else others).append(name)
    for name in chain(sorted(main), sorted(others)):
        yield inside + name, _kind(name, _suffix(name), is_hidden)
    for name in sorted(name for is_folder, name in listed if is_folder):
        yield from _files(os.path.join(directory, name), seen, is_hidden=is_hidden or name == _MACOS_FOLDER)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link that leads to itself
        return False


def _contents(given: GivenInput) -> _Contents:
    """Looks through a folder once.

    Raises:
        ManifestError: It is not a folder, or cannot be listed.
        StorageError: The store cannot be listed.
    """
    found = _Contents()
    if isinstance(given.path, str):
        for info, kind in _objects(given.location):
            found.add(info.location, kind)
    else:
        given.check_folder()
        for path, kind in _files(given.location, set()):
            found.add(path, kind)
    return found


def _open(given: GivenInput) -> Opened:
    found = _contents(given)
    if given.format is None and found.tars:
        check_not_nemo(given)
    if found.num_audio and found.parquet:
        found.parquet, without_audio = parquet_beside_audio(found.parquet)
        for location in without_audio:
            found.count_other(location)
    has_tars_only = found.tars and not found.num_audio and not found.parquet
    folder = folder_of(found.tars) if has_tars_only else given.location

    def sources(root: str) -> list[Source]:
        if not (found.num_audio or found.tars or found.parquet):
            is_remote = isinstance(given.path, str)
            what = (
                "object of this name, and no audio below it" if is_remote else "audio in this folder or its subfolders"
            )
            raise ManifestError(f"{given.folder}: no {what}{found.others_text()}. docs/formats.md lists what is read.")
        opened: list[Source] = []
        if found.num_audio or found.others:
            if isinstance(given.path, str):
                opened.append(BucketFolder(given.location, root, found.num_audio, found.others))
            else:
                opened.append(AudioFolder(given.path, root, found.num_audio, found.others))
        if found.tars:
            tars = sorted(found.tars)
            opened.append(WebDataset(given.folder, tuple(tars), folder_of(tars), root))
        if found.parquet:
            opened.append(parquet_in_folder(given, sorted(found.parquet), root, is_beside_audio=bool(found.num_audio)))
        return opened

    return folder, sources


FORMAT = Format("folder", lambda given: given.kind == "folder", _open)
