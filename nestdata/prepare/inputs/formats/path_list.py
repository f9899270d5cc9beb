"""Lists of paths, one audio file per line: paths or URLs alone, and fairseq's wav2vec manifests.

The first line of fairseq is the folder of its files; each of the others, a path and a number of samples. A path may be
FILE:OFFSET:FRAMES, a span of a file in samples.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from nestdata.errors import ManifestError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Entry
from nestdata.prepare.inputs.format import GivenInput, Opened
from nestdata.prepare.inputs.formats.table import is_table, slice_of
from nestdata.prepare.inputs.lines import LineSource, Manifest
from nestdata.prepare.inputs.rows import FileNames, cut_id_of, resolve
from nestdata.storage import has_scheme, is_url, name_of, parent

_SUFFIXES = (".txt", ".lst", ".list", ".txt.gz", ".lst.gz", ".list.gz")

# Numbers of samples with more digits are mistakes: such a file would last centuries.
_MAX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class PathList(LineSource):
    """Paths without anything else: neither spans nor labels."""

    format: ClassVar[InputFormat] = "list"
    manifest: Manifest
    names: FileNames

    def entries(self, number: int, item: bytes) -> Iterator[Entry]:
        """Yields the entry of a line; none for a blank one."""
        name = _name_in(item)
        if "\0" in name:
            raise ManifestError(f"{self.where(number)}: a NUL character in the path {name[:80]!r}. Fix this line.")
        if name.strip():
            file = self.names.file(name)
            yield Entry(self.where(number), self.names.cut_id(file, name), file)


def _is_list(given: GivenInput) -> bool:
    """Returns whether a file is a list of audio files, by its first line that is not blank, or by its own name.

    A line decides if it is a URL, ends like the name of an audio file, or names an existing file. Other lines decide
    nothing: a list whose own name ends in `.txt`, `.lst` or `.list` is taken as one.
    """
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


def open_list(given: GivenInput) -> Opened | None:
    """Opens a list of paths."""
    if given.format is None and not _is_list(given):
        return None
    names = FileNames.beside(given.parent, map(_name_in, given.manifest.lines()))
    return names.base, lambda root: PathList(given.manifest, replace(names, root=root))


def _name_in(line: bytes) -> str:
    """Returns the path in a line, which may begin and end with spaces."""
    return line.rstrip(b"\r\n").decode(errors="surrogateescape")


@dataclass(frozen=True, slots=True)
class FairseqManifest(LineSource):
    """Tab-separated paths and numbers of samples.

    The numbers count samples at the rate of each file, which the format does not give.
    """

    format: ClassVar[InputFormat] = "fairseq"
    num_header_lines: ClassVar[int] = 1
    manifest: Manifest
    names: FileNames
    """Relative paths start from the folder on the first line."""

    def entries(self, number: int, item: bytes) -> Iterator[Entry]:
        """Yields the entry of a line; none for a blank one."""
        if not item.strip():
            return
        where = self.where(number)
        name, *counts = item.rstrip(b"\r\n").split(b"\t")
        count = counts[0].strip() if len(counts) == 1 else b""
        if not name or not count.isdigit() or len(count) > _MAX_DIGITS:
            raise ManifestError(
                f"{where}: {item[:80]!r} is not a path, a tab and a number of samples. Fix or drop it; tables of more "
                "columns need a header with a column audio_filepath or path."
            )
        text = name.decode(errors="surrogateescape")
        if found := slice_of(text, self.names):
            cut_id, file, first, num_frames = found
            yield Entry(where, cut_id, file, first_frame=first, num_frames=num_frames)
            return
        file = self.names.file(text)
        yield Entry(where, cut_id_of(file.location, self.names.root), file, num_frames=int(count))


def _fairseq_folder(path: Path | str, line: bytes) -> str:
    """Returns the absolute location of the folder on the first line.

    It may be relative to the folder of the manifest or to the current directory, and begin with `~`.
    """
    name = _text(line)
    if isinstance(path, str) or has_scheme(name):
        return resolve(parent(str(path)), name).rstrip("/")
    beside = resolve("/", os.path.abspath(path.parent / name))
    found = (beside, os.path.abspath(name), os.path.abspath(os.path.expanduser(name)))
    return next((folder for folder in found if os.path.isdir(folder)), beside)


def _text(line: bytes) -> str:
    return line.strip().decode(errors="surrogateescape")


def _is_fairseq(given: GivenInput) -> bool:
    """Returns whether a manifest begins with a folder, or its name ends in `.tsv` and it is not a table."""
    path, line = given.path, given.lines.first
    if line.lstrip().startswith((b"{", b"[")):
        return False
    if is_url(_text(line)):  # a list of URLs begins with a URL as well
        return b"\t" in given.lines.second
    if str(path).endswith((".tsv", ".tsv.gz")):
        return not is_table(path, line, given.options.columns)
    return bool(line.strip()) and b"\0" not in line and os.path.isdir(_fairseq_folder(path, line))


def open_fairseq(given: GivenInput) -> Opened | None:
    """Opens a fairseq manifest."""
    if given.format is None and not _is_fairseq(given):
        return None
    first = given.lines.first
    if not first.strip() or b"\t" in first.strip():
        raise ManifestError(
            f"{given.path}:1: a fairseq manifest begins with the folder of its files, but this one begins with "
            f"{first[:80]!r}. Add the folder; other tables need a header with a column audio_filepath or path."
        )
    folder = _fairseq_folder(given.path, first)
    is_there = is_url(folder) or os.path.isdir(folder)
    problem = "" if is_there else ", which does not exist; write there where the audio is"
    hint = f"; names start from the folder on line 1, {folder}{problem}"
    names = FileNames((folder,), folder, hint=hint)
    return folder, lambda root: FairseqManifest(given.manifest, replace(names, root=root))
