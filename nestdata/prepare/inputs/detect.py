"""Detects the format of an input from its name, its files or its first lines.

Local inputs are `Path`, and those at URLs are `str`.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import get_args

from nestdata.corpus.addresses import common_folder
from nestdata.errors import ManifestError, StorageError
from nestdata.prepare.inputs.detect_shards import ShardInput, detect_by_name, detect_folder, detect_nemo
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, InputFormat, check_manifest, open_lines
from nestdata.prepare.inputs.fairseq import fairseq_folder, is_fairseq
from nestdata.prepare.inputs.folder import check_folder
from nestdata.prepare.inputs.huggingface import saved_version
from nestdata.prepare.inputs.jsonl import AUDIO_KEYS, parse_object
from nestdata.prepare.inputs.kaldi import base_directory, has_table
from nestdata.prepare.inputs.listing import objects_below
from nestdata.prepare.inputs.parquet import is_parquet, parquet_folder
from nestdata.storage import join, parent, storage


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectedInput:
    """One input, its format, and other properties that its source needs."""

    path: Path | str
    """The manifest or folder, as the caller gave it: a path, or a URL."""

    format: InputFormat
    folder: str
    """Absolute path or URL of the folder of the audio or, if the format does not name one, of the manifest.

    Ids are relative to the deepest folder that holds these folders of all inputs.
    """

    base: str
    """Absolute path or URL of the folder that relative paths in the input start from."""

    has_segments: bool = False
    """Whether a Kaldi directory has a `segments` file."""

    version: int = 0
    """Modification time of a Hugging Face data set, in ns."""

    shards: ShardInput | None = None
    """The tars of the input, if its audio is in tars."""


def detect_input(path: Path | str, form: InputFormat | None = None, tars: str | None = None) -> DetectedInput:
    """Detects the format of an input, and opens its manifest at most once to do so.

    Args:
        path: A manifest or folder: a local path, or a URL as a `str`.
        form: The format that the caller knows; None to detect it.
        tars: Pattern of the tars of a NeMo data set.

    Raises:
        ManifestError: The input does not exist, is not a file or folder, is empty, is of an unknown format, or cannot
            be of the given one.
        StorageError: A URL cannot be read or listed.
    """
    if form in (None, "parquet") and (form or is_parquet(path)):
        return _detect_parquet(path)
    if shards := detect_by_name(str(path), form, tars):
        return _in_shards(path, shards)
    if isinstance(path, str):
        return _detect_url(path, form, tars)
    if form in ("kaldi", "huggingface", "folder", "shar", "webdataset") or (form is None and path.is_dir()):
        return _detect_folder(path, form)
    if form is None and path.is_file() and path.name.lower().endswith(AUDIO_SUFFIXES):
        raise ManifestError(f"{path}: one audio file. Give the folder that holds it, or a manifest that names it.")
    return _detect_manifest(path, form, tars)


def common_root(inputs: Sequence[DetectedInput]) -> str:
    """Returns the folder that ids are relative to: the deepest one that holds the folders of all inputs.

    It is empty if there is none, as for a local input and one at a URL.
    """
    return reduce(common_folder, [found.folder for found in inputs])


def _detect_parquet(path: Path | str) -> DetectedInput:
    folder = parquet_folder(path)
    return DetectedInput(path=path, format="parquet", folder=folder, base=folder)


def _detect_url(url: str, form: InputFormat | None, tars: str | None) -> DetectedInput:
    if form in ("kaldi", "huggingface"):
        raise ManifestError(_not_at_url(url, form))
    is_folder = form in ("folder", "shar", "webdataset") or (
        form is None and (url.endswith("/") or not _is_object(url))
    )
    if not is_folder:
        if form is None and url.lower().endswith(AUDIO_SUFFIXES):
            raise ManifestError(f"{url}: one audio file. Give the folder that holds it, or a manifest that names it.")
        return _detect_manifest(url, form, tars)
    url = url.rstrip("/")
    if form == "folder":
        return DetectedInput(path=url, format="folder", folder=url, base=url)
    names = sorted({info.location[len(url) + 1 :].partition("/")[0] for info in objects_below(url)})
    if form is None and "wav.scp" in names:
        raise ManifestError(_not_at_url(url, "kaldi"))
    if form is None and not {"state.json", "dataset_dict.json"}.isdisjoint(names):
        raise ManifestError(_not_at_url(url, "huggingface"))
    if shards := detect_folder(url, [join(url, name) for name in names], form):
        return _in_shards(url, shards)
    return DetectedInput(path=url, format="folder", folder=url, base=url)


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


def _not_at_url(url: str, form: InputFormat) -> str:
    if form == "kaldi":
        return (
            f"{url}: a Kaldi directory is not read from a URL. Copy its text files to a local folder; wav.scp may "
            "name audio by URLs."
        )
    return (
        f"{url}: a data set that `save_to_disk` wrote is not read from a URL. Copy it to a local folder, or give its "
        "Parquet files."
    )


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


def _in_shards(path: Path | str, shards: ShardInput) -> DetectedInput:
    return DetectedInput(path=path, format=shards.format, folder=shards.folder, base=shards.folder, shards=shards)


def _detect_manifest(path: Path | str, form: InputFormat | None, tars: str | None) -> DetectedInput:
    folder = parent(path) if isinstance(path, str) else os.path.abspath(path.parent)
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
            location = path if isinstance(path, str) else os.path.abspath(path)
            return _in_shards(path, detect_nemo(location, str(path), tars))
    check_manifest(path)
    base = os.getcwd() if form == "lhotse" and isinstance(path, Path) else folder
    return DetectedInput(path=path, format=form, folder=folder, base=base)


def _format_of_line(line: bytes, path: Path | str, number: int) -> InputFormat:
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
