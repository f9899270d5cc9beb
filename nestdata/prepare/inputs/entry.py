"""What every input becomes: entries, each a span of audio not yet looked at, and sources that give them.

A source splits the reading in two. `items` runs in one process and does as little as can be done to tell one item from
the next; `entry` makes sense of an item, in whichever process the item was sent to.
"""

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, cast, runtime_checkable

from nestdata.errors import ManifestError

InputFormat = Literal["nemo", "lhotse", "fairseq", "kaldi", "folder", "huggingface"]

# Greater numbers of seconds are taken for mistakes; a recording of four months is shorter.
MOST_SECONDS = 1e7

AUDIO_SUFFIXES = (
    ".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".m4a", ".sph", ".w64", ".wma",
)  # fmt: skip

# What the labels of a cut are called in the inputs; everything else a manifest says is kept under its own name.
LABELS = {
    "text": "text",
    "sentence": "text",
    "transcription": "text",
    "lang": "language",
    "language": "language",
    "locale": "language",
    "speaker": "speaker",
    "speaker_id": "speaker",
}


class Entry(NamedTuple):
    """A span of audio that an input names, not yet looked at."""

    where: str
    """Place in the input, such as `speech.json:12`."""

    cut_id: str
    path: str = ""
    """The audio file, absolute; empty where `command` or `cut` says where the audio is."""

    offset: float = 0.0
    """Seconds into the file."""

    duration: float | None = None
    """Seconds, or None for all that is left of the file."""

    num_frames: int | None = None
    """The same in samples of the file, at its own rate, where the input counts in those."""

    labels: dict[str, Any] | None = None
    """What else the input says, such as text, lang and speaker."""

    stored_path: str = ""
    """Where the file will lie when the corpus is in place, where that is not `path`."""

    command: str = ""
    """A shell command that writes the audio to its standard output."""

    cut: dict[str, Any] | None = None
    """The cut itself, where the manifest is one of Lhotse's."""


@runtime_checkable
class Source(Protocol):
    """One input. Small enough to be sent to other processes along with some of its items."""

    @property
    def path(self) -> Path:
        """The manifest or folder, as it was given."""

    def items(self) -> Iterator[Any]:
        """Yields what stands for one entry or none each: a line, a path, a number."""

    def entry(self, number: int, item: Any) -> Entry | None:
        """Makes an entry of the item that is the number-th, counted from 1; None for a blank line.

        Raises:
            ManifestError: The item cannot be understood; the message names its place.
        """

    def where(self, number: int) -> str:
        """Names the place of the number-th item."""

    def count(self) -> int | None:
        """Returns about how many items there are, or None where that costs as much as reading them."""


@contextmanager
def open_lines(path: Path) -> Iterator[BinaryIO]:
    """Opens a manifest, compressed or not, for reading lines; a byte order mark is skipped.

    Raises:
        ManifestError: It does not exist, or breaks while it is read.
    """
    if not path.is_file():
        raise ManifestError(_why_no_manifest(path))
    try:
        with cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as file:
            if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                file.seek(0)
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise ManifestError(f"{path}: cannot be read ({error}). Check the file and copy it again.") from error


def count_lines(path: Path) -> int:
    """Counts the lines of a manifest: how much work a progress bar stands for."""
    with open_lines(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def names_shards(name: str) -> bool:
    """Tells whether a path is one of NeMo's patterns, such as `audio_{0..7}.tar` or `audio__OP_0..7_CL_.tar`."""
    # Looking for the dots first takes a tenth of the time, and most names have none.
    return ".." in name and re.search(r"(?:[\[({<]|_OP_)\d+\.\.\d+(?:[\])}>]|_CL_)", name) is not None


def cut_id_of(file: str, root: str) -> str:
    """Returns the path below the root without its ending: the same wherever the root lies.

    Both are absolute and normal. A file outside of the root has its absolute path for an id.
    """
    stem = os.path.splitext(file)[0]
    inside = root if root.endswith("/") else root + "/"
    return stem[len(inside) :] if stem.startswith(inside) else stem


def resolve(directory: str, name: str) -> str:
    """Returns the absolute path of a file that is named relative to a directory."""
    path = name if name.startswith("/") else f"{directory}/{name}"
    # Most names need no more than this, and for millions of them the difference is minutes. Two slashes at the start
    # survive `normpath`.
    return os.path.normpath(path).replace("//", "/") if "/." in path or "//" in path else path


def check_command(command: str, where: str, *, allowed: bool) -> None:
    """Raises ManifestError where an input gives a command in place of a file, and may not."""
    if not allowed:
        raise ManifestError(
            f"{where}: a command in place of a file, which would be run: {command[:120]!r}. If you trust it, allow it "
            "with --allow-commands; or write the audio to files first."
        )


def _why_no_manifest(path: Path) -> str:
    if names_shards(path.name):
        return (
            f"{path}: a pattern for the shards of a tarred data set, which is not read as such. Unpack its tars into "
            "one folder, and give that folder, or a manifest of its files without shard_id."
        )
    if path.is_dir():
        return f"{path}: a folder where a manifest was expected. Give a file in it, or leave out --format."
    return f"{path}: no such manifest. Give a manifest, a Kaldi directory, or a folder of audio."
