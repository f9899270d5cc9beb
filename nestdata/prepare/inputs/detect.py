"""Detects the format of an input from its name, its files or its first lines."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.detect_shards import ShardInput, detect_by_name, detect_folder, detect_nemo
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, InputFormat, check_manifest, open_lines
from nestdata.prepare.inputs.fairseq import fairseq_folder, is_fairseq
from nestdata.prepare.inputs.folder import check_folder
from nestdata.prepare.inputs.huggingface import saved_version
from nestdata.prepare.inputs.jsonl import AUDIO_KEYS, parse_object
from nestdata.prepare.inputs.kaldi import base_directory, has_table


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectedInput:
    """One input, its format, and other properties that its source needs."""

    path: Path
    """The manifest or folder, as the caller gave it."""

    format: InputFormat
    folder: str
    """Absolute path of the folder of the audio or, if the format does not name one, of the manifest.

    Ids are relative to the deepest folder that holds these folders of all inputs.
    """

    base: str
    """Absolute path of the folder that relative paths in the input start from."""

    has_segments: bool = False
    """Whether a Kaldi directory has a `segments` file."""

    version: int = 0
    """Modification time of a Hugging Face data set, in ns."""

    shards: ShardInput | None = None
    """The tars of the input, if its audio is in tars."""


def detect_input(path: Path, form: InputFormat | None = None, tars: str | None = None) -> DetectedInput:
    """Detects the format of an input, and opens its manifest at most once to do so.

    Args:
        path: A manifest or folder.
        form: The format that the caller knows; None to detect it.
        tars: Pattern of the tars of a NeMo data set.

    Raises:
        ManifestError: The input does not exist, is not a file or folder, is empty, is of an unknown format, or cannot
            be of the given one.
    """
    if shards := detect_by_name(str(path), form, tars):
        return _in_shards(path, shards)
    if form in ("kaldi", "huggingface", "folder", "shar", "webdataset") or (form is None and path.is_dir()):
        return _detect_folder(path, form)
    if form is None and path.is_file() and path.name.lower().endswith(AUDIO_SUFFIXES):
        raise ManifestError(f"{path}: one audio file. Give the folder that holds it, or a manifest that names it.")
    return _detect_manifest(path, form, tars)


def common_root(inputs: Sequence[DetectedInput]) -> Path:
    """Returns the folder that ids are relative to: the deepest one that holds the folders of all inputs."""
    return Path(os.path.commonpath([found.folder for found in inputs]))


def _detect_folder(path: Path, form: InputFormat | None) -> DetectedInput:
    folder = os.path.abspath(path)
    if form == "kaldi" or (form is None and (path / "wav.scp").is_file()):
        has_segments = has_table(path, "segments")
        return DetectedInput(
            path=path, format="kaldi", folder=folder, base=base_directory(path), has_segments=has_segments
        )
    if form not in ("folder", "shar", "webdataset"):
        version = saved_version(path)
        if version is not None:
            return DetectedInput(path=path, format="huggingface", folder=folder, base=os.getcwd(), version=version)
        if form == "huggingface":
            raise ManifestError(f"{path}: not one split of a data set that `save_to_disk` wrote. Save it again.")
    check_folder(path)
    if form != "folder" and (shards := detect_folder(str(path), [str(name) for name in Path(folder).iterdir()], form)):
        return _in_shards(path, shards)
    return DetectedInput(path=path, format="folder", folder=folder, base=folder)


def _in_shards(path: Path, shards: ShardInput) -> DetectedInput:
    return DetectedInput(path=path, format=shards.format, folder=shards.folder, base=shards.folder, shards=shards)


def _detect_manifest(path: Path, form: InputFormat | None, tars: str | None) -> DetectedInput:
    folder = os.path.abspath(path.parent)
    if form in (None, "fairseq", "nemo"):
        with open_lines(path) as file:
            line, number = file.readline(), 1
            if form == "fairseq" or (form is None and is_fairseq(path, line)):
                folder = fairseq_folder(path, line)
                return DetectedInput(path=path, format="fairseq", folder=folder, base=folder)
            while line and not line.strip():
                line, number = file.readline(), number + 1
        form = form or _format_of_line(line, path, number)
        if form == "nemo" and (tars is not None or b'"shard_id"' in line):
            return _in_shards(path, detect_nemo(os.path.abspath(path), str(path), tars))
    check_manifest(path)
    return DetectedInput(path=path, format=form, folder=folder, base=os.getcwd() if form == "lhotse" else folder)


def _format_of_line(line: bytes, path: Path, number: int) -> InputFormat:
    """Returns the format of a JSON manifest from its first non-blank line, which is empty if it has none."""
    if not line:
        raise ManifestError(f"{path}: the manifest is empty. Check the command that wrote it.")
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
