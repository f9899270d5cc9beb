"""Single audio files, which the caller names one by one."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from nestdata.prepare.inputs.audio import File
from nestdata.prepare.inputs.entry import Entry, cut_id_of
from nestdata.prepare.inputs.format import Format, GivenInput, Opened
from nestdata.prepare.inputs.lines import check_manifest


@dataclass(frozen=True, slots=True)
class AudioFiles:
    """Consecutive inputs that are audio files, as one source: a list in Python may hold a million."""

    items_per_task: ClassVar[None] = None
    path: Path | str
    """The first file."""

    root: str
    named: list[Path | str] = field(repr=False)
    """All files: paths, and URLs as `str`. They are not pickled, because items name them."""

    def items(self) -> Iterator[str]:
        """Yields absolute paths and URLs.

        Raises:
            ManifestError: A file does not exist, or is not a regular one.
            StorageError: A store cannot be asked.
        """
        for file in self.named:
            check_manifest(file)
            yield file if isinstance(file, str) else os.path.abspath(file)

    def entries(self, number: int, item: str) -> Iterator[Entry]:  # noqa: ARG002, the path is enough
        """Yields the entry of a file."""
        yield Entry(item, cut_id_of(item, self.root), File(item))

    def where(self, number: int) -> str:
        """Returns the path of the file; that of the first with its number, in a process without the others."""
        return str(self.named[number - 1]) if self.named else f"{self.path} (file {number})"

    def count(self) -> int | None:
        """Returns the number of files."""
        return len(self.named)

    def __reduce__(self) -> tuple[type["AudioFiles"], tuple[Path | str, str, list[Path | str]]]:
        return AudioFiles, (self.path, self.root, [])


def _open(given: GivenInput) -> Opened:
    check_manifest(given.path)
    return given.parent, lambda root: AudioFiles(given.path, root, [given.path])


FORMAT = Format("audio", lambda given: given.kind == "audio", _open)
