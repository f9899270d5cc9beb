"""What callers may give as audio, and what a format of inputs is: how it recognises an input, and how it opens one.

All functions and commands that read audio accept the same inputs, by `audio_inputs`. Local inputs are `Path`, and those
at URLs are `str`.
"""

import codecs
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nestdata.audio.channels import Channel
from nestdata.columns import Column
from nestdata.errors import ManifestError, StorageError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Source
from nestdata.prepare.inputs.lines import LineReader, is_spread, open_lines, parse_object, spread_objects
from nestdata.prepare.inputs.patterns import TAR, cannot_be_listed, expand, is_pattern, objects_below
from nestdata.redaction import redacted_url
from nestdata.storage import has_scheme, is_url, join, parent, storage
from nestdata.storage.location import parse_url
from nestdata.wrong_path import wrong_path

AudioInput = str | os.PathLike[str] | Any
"""Audio: the path or URL of whatever `nestdata prepare` reads, such as `talk.wav`, `speech.csv`, a folder or a corpus
directory; a `Corpus`; or Lhotse's `CutSet` or `RecordingSet`."""

# First bytes of a file that are looked at.
_HEAD_BYTES = 1024
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Commas between inputs, without those in braces of a pattern.
_SEVERAL = re.compile(r",(?![^{}]*\})")

AudioInputs = AudioInput | Sequence[AudioInput]
"""One `AudioInput`, or a sequence of them, in any combination."""


def audio_inputs(given: AudioInputs) -> list[Any]:
    """Returns inputs as a list, with local paths as `Path` and URLs as `str`.

    Raises:
        ManifestError: There is no input, one has a wrong type, or a URL is given as a `Path`.
        StorageError: A URL holds credentials.
    """
    is_one = _is_input(given) or isinstance(given, (bytes, Mapping)) or hasattr(given, "__array__")
    inputs: list[Any] = [given] if is_one or not isinstance(given, Iterable) else [*given]
    inputs = [part for value in inputs for part in (_listed(value) if isinstance(value, str) else [value])]
    if not inputs:
        raise ManifestError("no input was given: name a file, a folder or a manifest.")
    return [_checked(value) for value in inputs]


def _listed(text: str) -> list[str]:
    """Returns the inputs in a text: itself, or several as NeMo's configurations list them: `[[a.json],[b.json]]`.

    Source: NVIDIA NeMo 3.0, `manifest_filepath` of its data loaders.
    """
    if os.path.exists(text) or not (text.startswith("[") or _SEVERAL.search(text)):
        return [text]
    parts = [part.strip(" []'\"") for part in _SEVERAL.split(text)]
    is_listed = text.startswith("[") and text.endswith("]") and len(parts) > 1
    is_there = is_listed or all(has_scheme(part) or os.path.exists(part) for part in parts)
    return parts if all(parts) and is_there else [text]


def is_lhotse(given: object) -> bool:
    """Returns whether an object is a set of cuts or recordings of Lhotse, without importing Lhotse."""
    lhotse = sys.modules.get("lhotse")
    return lhotse is not None and isinstance(given, (lhotse.CutSet, lhotse.RecordingSet))


def is_corpus(given: object) -> bool:
    """Returns whether an object is a `Corpus`, without importing numpy."""
    module = sys.modules.get("nestdata.corpus.corpus")
    return module is not None and isinstance(given, module.Corpus)


def _is_input(given: object) -> bool:
    return isinstance(given, (str, os.PathLike)) or is_lhotse(given) or is_corpus(given)


def _checked(given: Any) -> Any:
    if not _is_input(given):
        raise ManifestError(
            f"{type(given).__name__} where audio was expected ({given!r:.80}). Give a path or URL, a Corpus, a CutSet "
            "or RecordingSet of Lhotse, or a list of these."
        )
    if not str(given):
        raise ManifestError("an empty path was given as input. Check the variable that holds it.")
    if isinstance(given, str) and has_scheme(given):
        parse_url(given)  # refuses credentials before anything is named after the URL
        return given
    if not isinstance(given, (str, os.PathLike)):
        return given
    path = Path(given)
    if has_scheme(str(path).replace(":/", "://", 1)) and not isinstance(given, str) and not path.exists():
        raise ManifestError(f"{redacted_url(str(path))}: give URLs as str; a Path loses one of the two slashes.")
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class InputOptions:
    """Settings that apply to all inputs of one corpus."""

    format: InputFormat | None = None
    """Format of every input; None to detect it."""

    channel: Channel | None = None
    """Channel of every cut of Lhotse; None for that which it names itself."""

    columns: tuple[Column, ...] = ()
    """What the caller says of columns and keys."""

    tars: tuple[str, ...] = ()
    """Patterns of the tars of NeMo manifests: none to find them beside the manifests, one for all inputs, or one for
    each input."""

    write_to: Path = Path()
    """The corpus directory, for copies of embedded audio."""

    stored_in: Path = Path()
    """Path of the same directory once the corpus is in place."""


Opened = tuple[str, Callable[[str], Source | Sequence[Source]]]
"""Absolute path or URL of the folder of the audio or, if the format does not name one, of the manifest; and a function
that returns the source, given the folder that ids are relative to: the deepest one that holds those of all inputs. A
folder of audio, tars and Parquet files is a sequence of sources."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of inputs."""

    name: InputFormat
    detect: Callable[["GivenInput"], bool]
    """Returns whether an input is of this format; only asked if the caller does not know it."""

    open: Callable[["GivenInput"], Opened]
    """Opens an input of this format; raises ManifestError if it cannot be of this format."""


class FirstLines(NamedTuple):
    """The lines of a manifest that tell its format."""

    first: bytes
    text: bytes
    """The first line that is not blank; empty if there is none."""

    number: int
    """The number of `text`, counted from 1."""

    second: bytes
    """The line behind `text`; empty if this is the start of a JSON array."""


@dataclass(frozen=True)
class GivenInput:
    """One input, and what its detection reads of it, each at most once."""

    path: Path | str
    options: InputOptions
    number: int = 0
    """Index of the input, which names its files in the corpus directory."""

    tars: str | None = None
    """Pattern of the tars of a NeMo data set."""

    @property
    def format(self) -> InputFormat | None:
        """The format that the caller knows; None to detect it."""
        return self.options.format

    @cached_property
    def location(self) -> str:
        """Absolute path, or URL without a slash at its end."""
        return self.path.rstrip("/") if isinstance(self.path, str) else os.path.abspath(self.path)

    def folders(self, name: str) -> tuple[str, str]:
        """Returns a folder in the corpus directory for files of the input: now, and once the corpus is in place."""
        below = f"{name}/{self.number}"
        return str(self.options.write_to / below), str(self.options.stored_in / below)

    @property
    def folder(self) -> Path | str:
        """The path of a folder as the caller gave it; a URL without a slash at its end."""
        return self.location if isinstance(self.path, str) else self.path

    @property
    def parent(self) -> str:
        """Absolute path or URL of the folder that holds the input."""
        return parent(self.path) if isinstance(self.path, str) else os.path.abspath(self.path.parent)

    @cached_property
    def is_pattern(self) -> bool:
        """Whether the path stands for several files."""
        return is_pattern(str(self.path)) and (isinstance(self.path, str) or not os.path.exists(self.path))

    @cached_property
    def names(self) -> list[str]:
        """Absolute paths or URLs that a pattern stands for; the location itself for any other input."""
        return expand(self.location) if self.is_pattern else [self.location]

    @property
    def is_tars(self) -> bool:
        """Whether the path names a tar or a pattern of tars."""
        is_named = self.is_pattern or isinstance(self.path, str) or os.path.isfile(self.path)
        return is_named and TAR.fullmatch(self.names[0]) is not None

    @cached_property
    def kind(self) -> Literal["tars", "manifests", "folder", "audio", "manifest"]:
        """A tar or a pattern of tars, another pattern, a folder, an audio file, or any other file."""
        if self.is_tars:
            return "tars"
        if self.is_pattern:
            return "manifests"
        if self.path.is_dir() if isinstance(self.path, Path) else self.path.endswith("/") or not _is_object(self.path):
            return "folder"
        return "audio" if str(self.path).lower().endswith(AUDIO_SUFFIXES) or self._is_binary else "manifest"

    @property
    def _is_binary(self) -> bool:
        """Whether a local file is no text, and thus no manifest: the decoders say what it is."""
        if isinstance(self.path, str) or str(self.path).lower().endswith(".gz") or not self.path.is_file():
            return False
        with self.path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        # Text in another encoding than UTF-8 has no NUL characters, apart from UTF-16.
        is_text = head.startswith(_UTF16) or b"\0" not in head
        return not is_text and "\ufffd" in head[: _HEAD_BYTES - 3].decode(errors="replace")

    @cached_property
    def children(self) -> list[str]:
        """Absolute paths or URLs of the files and folders in a folder.

        Raises:
            ManifestError: It is not a folder, or cannot be listed.
            StorageError: The store cannot be listed.
        """
        if isinstance(self.path, str):
            found = {info.location[len(self.location) + 1 :].partition("/")[0] for info in objects_below(self.location)}
            return [join(self.location, name) for name in sorted(found)]
        if self.path.is_file():
            reads = "a Kaldi directory, which holds wav.scp" if self.format == "kaldi" else "a folder"
            raise ManifestError(f"{self.path}: a file, but --format {self.format} reads {reads}. Give the folder.")
        if not self.path.is_dir():
            raise ManifestError(f"{self.path}: {wrong_path(self.path, 'audio')}")
        try:
            return [os.path.join(self.location, name) for name in os.listdir(self.location)]
        except OSError as error:
            raise cannot_be_listed(self.location, error) from error

    def check_folder(self) -> None:
        """Raises the errors of `children`."""
        _ = self.children

    def has_file(self, name: str) -> bool:
        """Returns whether there is a file of this name in a folder."""
        path = join(self.location, name)
        return path in self.children and (is_url(path) or os.path.isfile(path))

    @cached_property
    def lines(self) -> FirstLines:
        """The first lines of a manifest.

        Raises:
            ManifestError: The format is not known, and the manifest is empty or not in UTF-8; or it cannot be read.
        """
        with open_lines(self.path) as lines:
            first = text = _first_part(lines)
            number = 1
            while text and not text.strip():
                text, number = _first_part(lines), number + 1
            found = FirstLines(first, text, number, b"" if text.startswith(b"[") else lines.readline())
        if self.format is None and not text:
            raise ManifestError(f"{self.path}: the manifest is empty. Check the command that wrote it.")
        if self.format is None and text.startswith(_UTF16):
            raise ManifestError(
                f"{self.path}: text in UTF-16. Save it as UTF-8, for instance with `iconv -f UTF-16 -t UTF-8`."
            )
        return found

    @property
    def is_spread(self) -> bool:
        """Whether the manifest is JSON, and its objects are not one per line."""
        return is_spread(self.lines.text)

    @cached_property
    def first_object(self) -> bytes:
        """The text of the first JSON object, which is a line in most manifests; empty if there is none.

        Raises:
            ManifestError: The objects are not one per line, and the first is not a JSON object.
        """
        return next(spread_objects(self.path), b"") if self.is_spread else self.lines.text

    @cached_property
    def row(self) -> dict[str, Any]:
        """The first JSON object.

        Raises:
            ManifestError: It is not one.
        """
        try:
            return parse_object(self.first_object, f"{self.path}:{self.lines.number}") or {}
        except ManifestError as error:
            raise ManifestError(
                f"{error} Other kinds of input: an audio file, a folder of audio, a CSV with a column audio_filepath, "
                "a list of paths, a fairseq manifest, a Kaldi directory, a Hugging Face data set; see docs/formats.md."
            ) from error


def _first_part(lines: LineReader) -> bytes:
    """Reads a line; of a JSON array that has no end in the buffer, returns that part: it may be longer than lines."""
    start = lines.file.peek()
    return start if start.startswith(b"[") and b"\n" not in start else lines.readline()


def _is_object(url: str) -> bool:
    """Returns whether there is an object of this name; a bucket is not one."""
    if parent(url) == url:
        return False
    try:
        storage().info(url)
    except StorageError as error:
        if error.kind != "missing":
            raise
        return False
    return True
