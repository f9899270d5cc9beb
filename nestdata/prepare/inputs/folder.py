"""A folder of audio: every file below it whose name ends like audio."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Entry, cut_id_of


@dataclass(frozen=True, slots=True)
class AudioFolder:
    """Files by name, a folder's own before those of the folders in it.

    Links are followed, but no folder is read twice, whatever leads to it.
    """

    path: Path
    root: str

    def items(self) -> Iterator[str]:
        """Yields absolute paths; raises ManifestError where there is no audio, or a folder cannot be listed."""
        if not self.path.is_dir():
            raise ManifestError(f"{self.path}: no such folder.")
        found = False
        for file in _audio_below(os.path.abspath(self.path), set()):
            found = True
            yield file
        if not found:
            raise ManifestError(
                f"{self.path}: no audio in this folder or below it. Looked for {' '.join(AUDIO_SUFFIXES)}."
            )

    def entry(self, number: int, item: str) -> Entry | None:  # noqa: ARG002, the name says where it is
        """Makes an entry of a file."""
        return Entry(item, cut_id_of(item, self.root), item)

    def where(self, number: int) -> str:
        """Names the folder and the number of the file in it."""
        return f"{self.path} (file {number})"

    def count(self) -> int | None:
        """Returns None: finding the files is all the work there is."""
        return None


def _audio_below(directory: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """Yields files in an order that does not depend on the file system, holding one folder's names at a time.

    Adds to `seen` the folders that it reads, and leaves out those that are there.
    """
    try:
        status = os.stat(directory)
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(directory) as entries:
            listed = sorted((entry.name, _is_folder(entry)) for entry in entries)
    except OSError as error:
        raise ManifestError(f"{directory}: cannot be listed ({error.strerror}). Allow it, or move it away.") from error
    for name, is_folder in listed:
        if not is_folder and name.lower().endswith(AUDIO_SUFFIXES):
            yield os.path.join(directory, name)
    for name, is_folder in listed:
        if is_folder:
            yield from _audio_below(os.path.join(directory, name), seen)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False
