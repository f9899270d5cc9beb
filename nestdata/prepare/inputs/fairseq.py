"""fairseq's wav2vec manifests: a folder on the first line, then a path below it and its number of samples a line."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.entry import Entry, count_lines, cut_id_of, open_lines, resolve

# Of a number of samples; more would be some centuries.
_MOST_DIGITS = 15


@dataclass(frozen=True, slots=True)
class FairseqManifest:
    """Tab-separated path and number of samples.

    The number counts samples at the rate of the file, which the format does not say.
    """

    path: Path
    root: str
    folder: str
    """The folder that the first line names, absolute."""

    def items(self) -> Iterator[bytes]:
        """Yields the lines after the first."""
        with open_lines(self.path) as file:
            file.readline()
            yield from file

    def entry(self, number: int, item: bytes) -> Entry | None:
        """Makes an entry of a line; None for a blank one."""
        if not item.strip():
            return None
        name, tab, count = item.rstrip(b"\r\n").partition(b"\t")
        if not name or not tab or not count.strip().isdigit() or len(count.strip()) > _MOST_DIGITS:
            raise ManifestError(
                f"{self.where(number)}: {item[:80]!r} is not a path, a tab and a number of samples. Fix or drop it."
            )
        path = resolve(self.folder, name.decode(errors="surrogateescape"))
        return Entry(self.where(number), cut_id_of(path, self.root), path, num_frames=int(count))

    def where(self, number: int) -> str:
        """Names the line as an editor counts it, which counts the folder as well."""
        return f"{self.path}:{number + 1}"

    def count(self) -> int | None:
        """Returns the number of lines after the first."""
        return count_lines(self.path) - 1


def is_fairseq(path: Path, first_line: bytes) -> bool:
    """Tells whether a file is such a manifest: by its name, or because it begins with a folder that is there."""
    if first_line.lstrip().startswith((b"{", b"[")):
        return False
    return path.name.endswith((".tsv", ".tsv.gz")) or (
        bool(first_line.strip()) and b"\0" not in first_line and os.path.isdir(_folder(path, first_line))
    )


def folder_of(path: Path) -> str:
    """Returns the folder that the first line names, absolute; a relative one is relative to the manifest.

    Raises:
        ManifestError: The first line cannot be that.
    """
    with open_lines(path) as file:
        line = file.readline()
    if not line.strip() or b"\t" in line.strip():
        raise ManifestError(
            f"{path}:1: a fairseq manifest begins with the folder of its files, and this one with {line[:80]!r}. "
            "Add the folder; of another table, make JSON lines with audio_filepath."
        )
    return _folder(path, line)


def _folder(path: Path, line: bytes) -> str:
    return resolve("/", os.path.abspath(path.parent / line.strip().decode(errors="surrogateescape")))
