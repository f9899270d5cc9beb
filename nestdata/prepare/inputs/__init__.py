"""Reads what people have: NeMo, Lhotse and fairseq manifests, Kaldi directories, Hugging Face data sets, folders.

A manifest that cannot be read is an error that stops the work; whether the audio behind an entry is usable is decided
later, in `nestdata.prepare.probe`.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, LABELS, Entry, InputFormat, Source, open_lines
from nestdata.prepare.inputs.fairseq import FairseqManifest, folder_of, is_fairseq
from nestdata.prepare.inputs.folder import AudioFolder
from nestdata.prepare.inputs.huggingface import HuggingFaceDataset, is_saved_dataset
from nestdata.prepare.inputs.jsonl import AUDIO_KEYS, LhotseManifest, NemoManifest, parse_object
from nestdata.prepare.inputs.kaldi import KaldiDirectory, base_directory

__all__ = ["LABELS", "Entry", "InputFormat", "InputOptions", "Source", "common_root", "detect_format", "open_source"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InputOptions:
    """What a source needs to know beside its path."""

    root: Path
    """The folder that ids are relative to."""

    channel: int = 0
    """Channel of a recording whose manifest names none."""

    allow_commands: bool = False
    """Whether commands that a manifest gives in place of files may be run."""

    extract_to: Path = Path("audio")
    """Where audio that lies inside a data set is written."""

    stored_in: Path = Path("audio")
    """What that folder will be called once the corpus is in place."""


def open_source(path: Path, options: InputOptions, form: InputFormat | None = None) -> Source:
    """Opens one input, taken to be of a format, or told by looking.

    Raises:
        ManifestError: It does not exist, or is of no known kind.
        ConfigError: It needs a package that is not installed.
    """
    form = form or detect_format(path)
    root = str(options.root)
    match form:
        case "nemo":
            return NemoManifest(path, root, os.path.abspath(path.parent))
        case "lhotse":
            return LhotseManifest(path, os.getcwd(), options.channel, options.allow_commands)
        case "fairseq":
            return FairseqManifest(path, root, folder_of(path))
        case "kaldi":
            has_segments = (path / "segments").is_file()
            return KaldiDirectory(path, base_directory(path), options.allow_commands, has_segments)
        case "huggingface":
            return HuggingFaceDataset.open(path, root, str(options.extract_to), str(options.stored_in))
        case "folder":
            return AudioFolder(path, root)


def detect_format(path: Path) -> InputFormat:
    """Tells what an input is by looking into it.

    Raises:
        ManifestError: It does not exist, is empty, or its first line is of no known kind.
    """
    if path.is_dir():
        if (path / "wav.scp").is_file():
            return "kaldi"
        return "huggingface" if is_saved_dataset(path) else "folder"
    if path.is_file() and path.name.lower().endswith(AUDIO_SUFFIXES):
        raise ManifestError(f"{path}: one audio file. Give the folder that holds it, or a manifest that names it.")
    with open_lines(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and is_fairseq(path, line):
                return "fairseq"
            if line.strip():
                return _format_of_line(line, path, number)
    raise ManifestError(f"{path}: the manifest is empty. Check the command that wrote it.")


def common_root(inputs: Sequence[Path]) -> Path:
    """Returns the folder that ids are relative to: the deepest one that holds all manifests and folders of audio.

    For a fairseq manifest that is the folder that it names, wherever the manifest itself lies.
    """
    return Path(os.path.commonpath([_folder_of_input(path) for path in inputs]))


def _format_of_line(line: bytes, path: Path, number: int) -> InputFormat:
    try:
        row = parse_object(line, path, number) or {}
    except ManifestError as error:
        raise ManifestError(
            f"{error} Other kinds of input: a fairseq manifest, whose first line is a folder, "
            "a Kaldi directory, a Hugging Face data set saved to disk, a folder of audio."
        ) from error
    if any(key in row for key in AUDIO_KEYS):
        return "nemo"
    if str(row.get("type")).endswith("Cut") or "recording" in row or "sources" in row:
        return "lhotse"
    raise ManifestError(
        f"{path}:{number}: neither a NeMo line (no audio_filepath) nor a Lhotse cut or recording; its keys are: "
        f"{', '.join(list(row)[:6])}. Force a format with --format: {', '.join(get_args(InputFormat))}."
    )


def _folder_of_input(path: Path) -> str:
    if path.is_dir():
        return os.path.abspath(path)
    if path.is_file():
        with open_lines(path) as file:
            if is_fairseq(path, file.readline()):
                return folder_of(path)
    return os.path.abspath(path.parent)
