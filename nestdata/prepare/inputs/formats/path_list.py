"""Lists of paths: a text file with the path or URL of one audio file per line."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nestdata.errors import ManifestError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Entry
from nestdata.prepare.inputs.format import Format, GivenInput, Opened
from nestdata.prepare.inputs.lines import LineSource, numbered_lines
from nestdata.prepare.inputs.names import FileNames, id_of_name
from nestdata.storage import is_url, name_of

_SUFFIXES = (".txt", ".lst", ".list", ".txt.gz", ".lst.gz", ".list.gz")


@dataclass(frozen=True, slots=True)
class PathList(LineSource):
    """Paths without anything else: neither spans nor labels."""

    format: ClassVar[InputFormat] = "list"
    path: Path | str
    root: str
    names: FileNames

    def entries(self, number: int, item: bytes) -> Iterator[Entry]:
        """Yields the entry of a line; none for a blank one."""
        name = _name_in(item)
        if "\0" in name:
            raise ManifestError(f"{self.where(number)}: a NUL character in the path {name[:80]!r}. Fix this line.")
        if name.strip():
            file = self.names.file(name)
            yield Entry(self.where(number), id_of_name(file.location, name, self.root), file)


def _detect(given: GivenInput) -> bool:
    """Returns whether a file is a list of audio files, by its first line that is not blank, or by its own name.

    A line decides if it is a URL, ends like the name of an audio file, or names an existing file. Other lines decide
    nothing: a list whose own name ends in `.txt`, `.lst` or `.list` is taken as one.
    """
    if given.kind != "manifest":
        return False
    name = _name_in(given.lines.text)
    if name_of(str(given.path)) == "wav.scp":
        raise ManifestError(f"{given.path}: a file of a Kaldi directory. Give the folder that holds it.")
    if not name.strip() or name.lstrip().startswith(("{", "[")):
        return False
    if (
        is_url(name)
        or name.rstrip("\0").lower().endswith(AUDIO_SUFFIXES)
        or str(given.path).lower().endswith(_SUFFIXES)
    ):
        return True
    return isinstance(given.path, Path) and os.path.isfile(given.path.parent / name)


def _open(given: GivenInput) -> Opened:
    names = FileNames.beside(given.parent, lambda: (_name_in(line) for _, line in numbered_lines(given.location)))
    return names.base, lambda root: PathList(given.path, root, names)


FORMAT = Format("list", _detect, _open)


def _name_in(line: bytes) -> str:
    """Returns the path in a line, which may begin and end with spaces."""
    return line.rstrip(b"\r\n").decode(errors="surrogateescape")
