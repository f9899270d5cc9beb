"""Lists of paths: a text file with the path or URL of one audio file per line."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.audio import File
from nestdata.prepare.inputs.entry import (
    AUDIO_SUFFIXES,
    Entry,
    base_directory,
    count_lines,
    id_of_name,
    open_lines,
    resolve,
)
from nestdata.storage import parent

_SUFFIXES = (".txt", ".lst", ".list", ".txt.gz", ".lst.gz", ".list.gz")


@dataclass(frozen=True, slots=True)
class PathList:
    """Paths without anything else: neither spans nor labels."""

    items_per_task: ClassVar[None] = None
    path: Path | str
    root: str
    directory: str
    """Absolute path or URL of the folder that relative paths start from."""

    def items(self) -> Iterator[bytes]:
        """Yields the lines."""
        with open_lines(self.path) as file:
            yield from file

    def entries(self, number: int, item: bytes) -> Iterator[Entry]:
        """Yields the entry of a line; none for a blank one."""
        name = _name_in(item)
        if not name.strip():
            return
        if "\0" in name:
            raise ManifestError(
                f"{self.where(number)}: a NUL character in the path {name[:80]!r}. Write one path per line, as "
                "`find -print` does."
            )
        path = resolve(self.directory, name)
        yield Entry(self.where(number), id_of_name(path, name, self.root), File(path))

    def where(self, number: int) -> str:
        """Returns the path and the line number, counted from 1."""
        return f"{self.path}:{number}"

    def count(self) -> int | None:
        """Returns the number of lines."""
        return count_lines(self.path)


def is_path_list(path: Path | str, first_line: bytes) -> bool:
    """Returns whether a file is a list of audio files, by its first line that is not blank, or by its own name.

    A line decides if it ends like the name of an audio file or names an existing file. Other lines decide nothing:
    a list whose own name ends in `.txt`, `.lst` or `.list` is taken as one.
    """
    name = _name_in(first_line)
    if not name.strip() or name.lstrip().startswith(("{", "[")):
        return False
    if name.rstrip("\0").lower().endswith(AUDIO_SUFFIXES) or str(path).lower().endswith(_SUFFIXES):
        return True
    return isinstance(path, Path) and os.path.isfile(path.parent / name)


def list_directory(path: Path | str) -> str:
    """Returns the absolute path or URL of the folder that relative paths in a list start from.

    The first one that exists in the folder of the list or in the current directory decides.
    """
    if isinstance(path, str):
        return parent(path)
    folder = os.path.abspath(path.parent)
    with open_lines(path) as file:
        return base_directory((_name_in(line) for line in file), (folder, os.getcwd()), folder)


def _name_in(line: bytes) -> str:
    """Returns the path in a line, which may begin and end with spaces."""
    return line.rstrip(b"\r\n").decode(errors="surrogateescape")
