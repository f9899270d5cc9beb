"""Takes the inputs of a corpus as callers give them, finds the format of each, and opens them as sources.

All functions and commands that read audio accept the same inputs; here, local ones are `Path`, and those at URLs are
`str`. The readers are in `formats`; `nestdata.input_format` lists them. Each is imported when it is asked.
"""

import codecs
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from importlib import import_module
from pathlib import Path
from typing import Any

from nestdata.audio.channels import Channel
from nestdata.columns import Column
from nestdata.errors import ConfigError, ManifestError, StorageError
from nestdata.input_format import FORMATS, InputFormat, InputKind
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Source
from nestdata.prepare.inputs.lines import FirstLines, Manifest, parse_object
from nestdata.prepare.inputs.patterns import (
    TAR,
    cannot_be_listed,
    expand,
    forget_answers,
    is_pattern,
    objects_below,
)
from nestdata.redaction import redacted_url
from nestdata.storage import common_folder, has_scheme, is_url, join, parent, storage
from nestdata.storage.location import parse_url
from nestdata.wrong_path import kind_of, wrong_path

# First bytes of a file that are looked at.
_HEAD_BYTES = 1024
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Manifests that stay open until they are read, each with some megabytes if it is at a URL; others are opened again.
_MAX_OPEN = 4
# Commas between inputs, without those in braces of a pattern.
_SEVERAL = re.compile(r",(?![^{}]*\})")

AudioInput = str | os.PathLike[str] | Any
"""Audio: the path or URL of whatever `nestdata prepare` reads, such as `talk.wav`, `speech.csv`, a folder or a corpus
directory; a `Corpus`; or Lhotse's `CutSet` or `RecordingSet`."""

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
    """Channel of every cut of Lhotse; None for the channel that a cut names."""

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
"""A folder, as an absolute path or URL, and a function that returns the source.

The folder holds the audio or, if the format does not name such a folder, the manifest. The function takes the folder
that ids are relative to: the deepest one that holds the folders of all inputs. It returns a sequence of sources for a
folder of audio, tars and Parquet files.

The reader of a format is a function of a `GivenInput` of one of its kinds that returns this. If the caller gives no
format, it returns None for an input of another format. It raises ManifestError if the input cannot be of this one."""


@dataclass(frozen=True)
class GivenInput:
    """One input, and what its detection reads of it, each once."""

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

    @property
    def folder(self) -> Path | str:
        """The path of a folder as the caller gave it; a URL without a slash at its end."""
        return self.location if isinstance(self.path, str) else self.path

    @property
    def parent(self) -> str:
        """Absolute path or URL of the folder that holds the input."""
        return parent(self.location)

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
    def kind(self) -> InputKind:
        """What it is, by its name and its first bytes."""
        if self.is_tars:
            return "tars"
        if self.is_pattern:
            return "manifests"
        if self.path.is_dir() if isinstance(self.path, Path) else self.path.endswith("/") or not _is_object(self.path):
            return "folder"
        return "audio" if str(self.path).lower().endswith(AUDIO_SUFFIXES) or self._is_binary else "manifest"

    @property
    def _is_binary(self) -> bool:
        """Whether a local file is not text, so that it cannot be a manifest: the decoders say what it is."""
        if isinstance(self.path, str) or str(self.path).lower().endswith(".gz") or not self.path.is_file():
            return False
        head = self.manifest.head(_HEAD_BYTES)
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
    def manifest(self) -> Manifest:
        """The input as a manifest, which the source goes on reading."""
        return Manifest(self.path)

    @cached_property
    def lines(self) -> FirstLines:
        """The first lines of a manifest.

        Raises:
            ManifestError: The format is not known, and the manifest is empty or not in UTF-8; or it cannot be read.
        """
        found = self.manifest.first_lines
        if self.format is None and not found.text:
            raise ManifestError(f"{self.path}: the manifest is empty. Check the command that wrote it.")
        if self.format is None and found.text.startswith(_UTF16):
            raise ManifestError(
                f"{self.path}: text in UTF-16. Save it as UTF-8, for instance with `iconv -f UTF-16 -t UTF-8`."
            )
        return found

    @cached_property
    def row(self) -> dict[str, Any]:
        """The first JSON object.

        Raises:
            ManifestError: It is not one.
        """
        try:
            lines = self.lines
            first = next(self.manifest.objects(), b"") if self.manifest.is_spread else lines.text
            return parse_object(first, f"{self.path}:{lines.number}") or {}
        except ManifestError as error:
            if self.format is not None:
                raise
            kinds = ", ".join(form.title for form in FORMATS.values())
            raise ManifestError(f"{error} Inputs may be: {kinds}; see docs/formats.md.") from error


def open_input(given: GivenInput) -> tuple[InputFormat, Opened]:
    """Returns the format of an input, and opens it.

    Raises:
        ManifestError: The input does not exist, is not a file or folder, is empty, is of an unknown format, or cannot
            be of the given one.
        ConfigError: It needs a package that is not installed.
        StorageError: A URL cannot be read or listed.
    """
    if given.format not in (None, "parquet"):
        if given.is_tars and given.format != "webdataset":
            raise ManifestError(
                f"{given.path}: a tar, which --format {given.format} does not read. Give the manifest, and the tars "
                "with --tars, or leave out --format to read it as WebDataset."
            )
        if given.is_pattern and given.format != "nemo" and not given.is_tars:
            raise ManifestError(f"{given.path}: a pattern of manifests, which is read for NeMo data sets only.")
    if given.format is None and str(given.path).lower().endswith((".yaml", ".yml", ".yaml.gz", ".yml.gz")):
        raise ManifestError(
            f"{given.path}: YAML, which is not read. Of a configuration, such as an input_cfg of NeMo, give each "
            "manifest as an argument of its own, and their tars with --tars. Write a manifest of Lhotse as JSON lines, "
            "with `lhotse copy FILE.yaml FILE.jsonl`."
        )
    if given.format is None and isinstance(given.path, Path) and kind_of(given.path) == "a model file":
        raise ManifestError(f"{given.path}: {wrong_path(given.path, 'audio')}")
    for name, form in FORMATS.items():
        is_asked = given.format == name or (given.format is None and (not form.kinds or given.kind in form.kinds))
        if is_asked and (opened := _reader(form.reader)(given)):
            return name, opened
    raise ManifestError(
        f"{given.path}:{given.lines.number}: neither a NeMo line (no audio_filepath) nor a Lhotse cut or recording; "
        f"its keys are: {', '.join(list(given.row)[:6])}. Say which one names the audio file, by --columns audio=KEY, "
        f"or force a format with --format: {', '.join(FORMATS)}."
    )


def open_sources(inputs: Sequence[Any], options: InputOptions) -> list[Source]:
    """Detects and opens all inputs of one corpus; consecutive audio files become one source.

    Ids are relative to the deepest folder that holds all manifests and folders of audio. For a fairseq
    manifest, this is the folder that it names, wherever the manifest itself is.

    Args:
        inputs: As `audio_inputs` returns them.
        options: Settings of all inputs.

    Raises:
        ManifestError: An input does not exist, or is of no known format.
        ConfigError: An input needs a package that is not installed, or the patterns of tars do not fit the inputs.
        StorageError: A URL cannot be read or listed.
    """
    if len(options.tars) not in (0, 1, len(inputs)):
        raise ConfigError(
            f"{len(options.tars)} patterns of tars for {len(inputs)} inputs. Give one for all inputs, or one for each, "
            "in the same order: --tars PATTERN PATTERN."
        )
    tars = options.tars if len(options.tars) == len(inputs) else [*options.tars, None][:1] * len(inputs)
    forget_answers()
    folders: list[str] = []
    openers: list[Callable[[str], Source | Sequence[Source]]] = []
    for number, (path, pattern) in enumerate(zip(inputs, tars, strict=True)):
        if is_corpus(path) or is_lhotse(path):
            openers.append(_reader("lhotse.open_object")(path, options.channel))
            continue
        given = GivenInput(path, options, number, pattern)
        _, (folder, opener) = open_input(given)
        if number >= _MAX_OPEN:
            given.manifest.close()
        folders.append(folder)
        openers.append(opener)
    # Empty if there is no such folder, as for a local input and one at a URL.
    root = reduce(common_folder, dict.fromkeys(folders)) if folders else ""
    opened = [opener(root) for opener in openers]
    joined: list[Source] = _reader("folder.joined")(
        each for found in opened for each in (found if isinstance(found, Sequence) else [found])
    )
    return joined


def _reader(name: str) -> Any:
    """Returns what has a name in a module of `formats`, which is imported now."""
    module, _, attribute = name.partition(".")
    return getattr(import_module(f"nestdata.prepare.inputs.formats.{module}"), attribute)


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
