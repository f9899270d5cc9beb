"""A folder of audio: all files in it and its subfolders that have the suffix of an audio format."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.audio import File
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Entry, cut_id_of
from nestdata.prepare.inputs.format import Format, GivenInput, Opened
from nestdata.prepare.inputs.listing import cannot_be_listed, objects_below
from nestdata.prepare.inputs.remote import whole_object
from nestdata.storage import ObjectInfo


@dataclass(frozen=True, slots=True)
class AudioFolder:
    """Audio files sorted by name; the files of a folder come before those of its subfolders.

    Symbolic links are followed, but no folder is read twice, even if several links lead to it.
    """

    items_per_task: ClassVar[None] = None
    path: Path
    root: str

    def items(self) -> Iterator[str]:
        """Yields absolute paths.

        Raises:
            ManifestError: There is no audio, or a folder cannot be listed.
        """
        found = False
        for file in _audio_files(os.path.abspath(self.path), set()):
            found = True
            yield file
        if not found:
            raise ManifestError(
                f"{self.path}: no audio in this folder or its subfolders. Looked for {' '.join(AUDIO_SUFFIXES)}."
            )

    def entries(self, number: int, item: str) -> Iterator[Entry]:  # noqa: ARG002, the path is enough
        """Yields the entry of a file."""
        yield Entry(item, cut_id_of(item, self.root), File(item))

    def where(self, number: int) -> str:
        """Returns the path of the folder and the number of the file in it."""
        return f"{self.path} (file {number})"

    def count(self) -> int | None:
        """Returns the number of files, which takes a small part of the time of reading their headers."""
        return sum(1 for _ in _audio_files(os.path.abspath(self.path), set()))


@dataclass(frozen=True, slots=True)
class BucketFolder:
    """Audio objects below a URL, in the order in which `AudioFolder` yields files of the same names."""

    items_per_task: ClassVar[None] = None
    path: str
    root: str

    def items(self) -> Iterator[ObjectInfo]:
        """Yields the objects.

        Raises:
            ManifestError: There is no audio.
            StorageError: The folder cannot be listed.
        """
        found = [info for info in objects_below(self.path) if info.location.lower().endswith(AUDIO_SUFFIXES)]
        if not found:
            raise ManifestError(
                f"{self.path}: no object of this name, and no audio below it. Looked for {' '.join(AUDIO_SUFFIXES)}."
            )
        yield from sorted_as_files(found)

    def entries(self, number: int, item: ObjectInfo) -> Iterator[Entry]:  # noqa: ARG002, the object is enough
        """Yields the entry of an object."""
        yield Entry(item.location, cut_id_of(item.location, self.root), whole_object(item))

    def where(self, number: int) -> str:
        """Returns the URL of the folder and the number of the object in it."""
        return f"{self.path} (object {number})"

    def count(self) -> int | None:
        """Returns the number of objects."""
        return sum(info.location.lower().endswith(AUDIO_SUFFIXES) for info in objects_below(self.path))


def sorted_as_files(objects: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Sorts objects so that those of a folder come before those of its subfolders, as `AudioFolder` sorts files."""

    def key(info: ObjectInfo) -> list[tuple[bool, str]]:
        *folders, name = info.location.split("/")
        return [*((True, folder) for folder in folders), (False, name)]

    return sorted(objects, key=key)


def _audio_files(directory: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """Yields audio files in an order that does not depend on the file system.

    Holds the names of one folder at a time. Skips folders whose device and inode are in `seen`, and adds those that it
    reads.
    """
    try:
        status = os.stat(directory)
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(directory) as entries:
            listed = sorted((entry.name, _is_folder(entry)) for entry in entries)
    except OSError as error:
        raise cannot_be_listed(directory, error) from error
    for name, is_folder in listed:
        if not is_folder and name.lower().endswith(AUDIO_SUFFIXES):
            yield os.path.join(directory, name)
    for name, is_folder in listed:
        if is_folder:
            yield from _audio_files(os.path.join(directory, name), seen)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link that leads to itself
        return False


def _open(given: GivenInput) -> Opened:
    if isinstance(given.path, str):
        return given.location, lambda root: BucketFolder(given.location, root)
    path = given.path
    given.check_folder()
    return given.location, lambda root: AudioFolder(path, root)


FORMAT = Format("folder", lambda given: given.kind == "folder", _open)
