"""A folder of audio: all files in it and its subfolders that have the suffix of an audio format."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Entry, cut_id_of


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
        yield Entry(item, cut_id_of(item, self.root), item)

    def where(self, number: int) -> str:
        """Returns the path of the folder and the number of the file in it."""
        return f"{self.path} (file {number})"

    def count(self) -> int | None:
        """Returns None: listing the files is all the work that `items` does."""
        return None


def check_folder(path: Path) -> None:
    """Raises ManifestError if a path does not lead to a folder."""
    if not path.is_dir():
        raise ManifestError(f"{path}: no such folder.")


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
        raise ManifestError(
            f"{directory}: cannot be listed ({error.strerror}). Grant read permission, or move the folder away."
        ) from error
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
