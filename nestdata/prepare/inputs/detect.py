"""Detects the format of an input from its name, its files or its first lines.

Local inputs are `Path`, and those at URLs are `str`.
"""

import codecs
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import get_args

from nestdata.errors import ManifestError, StorageError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.detect_shards import ShardInput, detect_by_name, detect_folder, detect_nemo
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, check_manifest, open_lines, where_paths_start
from nestdata.prepare.inputs.fairseq import fairseq_folder, is_fairseq
from nestdata.prepare.inputs.folder import names_in
from nestdata.prepare.inputs.huggingface import saved_version
from nestdata.prepare.inputs.jsonl import AUDIO_KEYS, parse_object
from nestdata.prepare.inputs.kaldi import audio_directory, has_table
from nestdata.prepare.inputs.listing import objects_below
from nestdata.prepare.inputs.parquet import is_parquet, parquet_folder
from nestdata.prepare.inputs.path_list import is_path_list, list_directory
from nestdata.prepare.inputs.table import Columns, is_table, read_columns, table_directory
from nestdata.storage import common_folder, join, name_of, parent, storage

_CORPUS_FILES = ("meta.json", "index.npy", "cuts.jsonl")


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

    columns: Columns | None = None
    """The header of a table."""

    is_corpus: bool = False
    """Whether the input is a corpus that was prepared before."""


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
    if form == "audio" or (form is None and path.name.lower().endswith(AUDIO_SUFFIXES)):
        return _detect_audio(path, os.path.abspath(path.parent))
    return _detect_manifest(path, form, tars)


def common_root(inputs: Sequence[DetectedInput]) -> str:
    """Returns the folder that ids are relative to: the deepest one that holds the folders of all inputs.

    It is empty if there is none, as for a local input and one at a URL.
    """
    return reduce(common_folder, dict.fromkeys(found.folder for found in inputs)) if inputs else ""


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
        if form == "audio" or (form is None and url.lower().endswith(AUDIO_SUFFIXES)):
            return _detect_audio(url, parent(url))
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


def _detect_audio(path: Path | str, folder: str) -> DetectedInput:
    check_manifest(path)
    return DetectedInput(path=path, format="audio", folder=folder, base=folder)


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
    if not path.is_dir():
        raise ManifestError(_why_no_folder(path, form))
    names = names_in(path)  # first, because the files in a folder without permissions cannot be looked up
    if form is None and all((path / name).is_file() for name in _CORPUS_FILES):
        return DetectedInput(path=path, format="lhotse", folder=folder, base=folder, is_corpus=True)
    if form == "kaldi" or (form is None and (path / "wav.scp").is_file()):
        if not has_table(path, "wav.scp"):
            raise ManifestError(f"{path}: no wav.scp in this folder, so that it is not a Kaldi directory.")
        has_segments, base = has_table(path, "segments"), audio_directory(path)
        return DetectedInput(path=path, format="kaldi", folder=folder, base=base, has_segments=has_segments)
    if form not in ("folder", "shar", "webdataset"):
        version = saved_version(path)
        if version is not None:
            return DetectedInput(path=path, format="huggingface", folder=folder, base=os.getcwd(), version=version)
        if form == "huggingface":
            raise ManifestError(f"{path}: not one split of a data set that `save_to_disk` wrote. Save it again.")
    if form != "folder" and (shards := detect_folder(str(path), names, form)):
        return _in_shards(path, shards)
    return DetectedInput(path=path, format="folder", folder=folder, base=folder)


def _in_shards(path: Path | str, shards: ShardInput) -> DetectedInput:
    return DetectedInput(path=path, format=shards.format, folder=shards.folder, base=shards.folder, shards=shards)


def _why_no_folder(path: Path, form: InputFormat | None) -> str:
    if not path.is_file():
        return f"{path}: no such folder. {where_paths_start(path)}"
    if form == "kaldi":
        return f"{path}: a file, but --format kaldi reads a Kaldi directory. Give the folder that holds wav.scp."
    return f"{path}: a file, but --format {form} reads a folder. Give the folder, or leave out --format."


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
    if form == "csv":
        columns = read_columns(path)
        folder = table_directory(path, columns)
        return DetectedInput(path=path, format="csv", folder=folder, base=folder, columns=columns)
    if form == "list":
        folder = list_directory(path)
        return DetectedInput(path=path, format="list", folder=folder, base=folder)
    if form == "nemo" and (tars is not None or b'"shard_id"' in line):
        location = path if isinstance(path, str) else os.path.abspath(path)
        return _in_shards(path, detect_nemo(location, str(path), tars))
    check_manifest(path)
    base = os.getcwd() if form == "lhotse" and isinstance(path, Path) else folder
    return DetectedInput(path=path, format=form, folder=folder, base=base)


def _format_of_line(line: bytes, path: Path | str, number: int) -> InputFormat:
    """Returns the format of a manifest from its first non-blank line, which is empty if it has none."""
    if not line:
        raise ManifestError(f"{path}: the manifest is empty. Check the command that wrote it.")
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ManifestError(f"{path}: text in UTF-16. Save it as UTF-8, for instance with `iconv -f UTF-16 -t UTF-8`.")
    if is_table(path, line):
        return "csv"
    if name_of(str(path)) == "wav.scp":
        raise ManifestError(f"{path}: a file of a Kaldi directory. Give the folder that holds it.")
    if is_path_list(path, line):
        return "list"
    try:
        row = parse_object(line, path, number) or {}
    except ManifestError as error:
        raise ManifestError(
            f"{error} Other kinds of input: an audio file, a folder of audio, a CSV with a column audio_filepath, a "
            "list of paths, a fairseq manifest, a Kaldi directory, a Hugging Face data set; see docs/formats.md."
        ) from error
    if any(key in row for key in AUDIO_KEYS):
        return "nemo"
    if str(row.get("type")).endswith("Cut") or "recording" in row or "sources" in row:
        return "lhotse"
    raise ManifestError(
        f"{path}:{number}: neither a NeMo line (no audio_filepath) nor a Lhotse cut or recording; its keys are: "
        f"{', '.join(list(row)[:6])}. Force a format with --format: {', '.join(get_args(InputFormat))}."
    )
