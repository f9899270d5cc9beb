"""Finds the format of each input of a corpus, and opens the inputs as sources."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple, get_args

from nestdata.errors import ConfigError, ManifestError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import Source
from nestdata.prepare.inputs.format import Format, GivenInput, InputOptions
from nestdata.prepare.inputs.formats import (
    audio_files,
    fairseq,
    folder,
    huggingface,
    kaldi,
    lhotse,
    nemo,
    parquet,
    path_list,
    shar,
    table,
    webdataset,
)
from nestdata.prepare.inputs.formats.audio_files import AudioFiles
from nestdata.prepare.inputs.formats.lhotse import LhotseManifest, open_objects
from nestdata.prepare.inputs.listing import forget_answers
from nestdata.prepare.inputs.names import FileNames
from nestdata.storage import common_folder

# In the order in which they are asked. The kind of an input and its first line are read once for all of them.
FORMATS: tuple[Format, ...] = (
    parquet.FORMAT,
    fairseq.FORMAT,
    table.FORMAT,
    path_list.FORMAT,
    nemo.FORMAT,
    lhotse.FORMAT,
    kaldi.FORMAT,
    huggingface.FORMAT,
    shar.FORMAT,
    webdataset.FORMAT,
    audio_files.FORMAT,
    folder.FORMAT,
)


class _DetectedInput(NamedTuple):
    """One input and its format; folder and source are those that `Format.open` returns."""

    format: InputFormat
    folder: str
    source: Callable[[str], Source | Sequence[Source]]


def _detect_input(given: GivenInput) -> _DetectedInput:
    """Detects the format of an input, and opens its manifest at most once to do so.

    Raises:
        ManifestError: The input does not exist, is not a file or folder, is empty, is of an unknown format, or cannot
            be of the given one.
        StorageError: A URL cannot be read or listed.
    """
    _check_format(given)
    for format_ in FORMATS:
        if format_.name == given.format or (given.format is None and format_.detect(given)):
            return _DetectedInput(format_.name, *format_.open(given))
    raise ManifestError(
        f"{given.path}:{given.line_number}: neither a NeMo line (no audio_filepath) nor a Lhotse cut or recording; its "
        f"keys are: {', '.join(list(given.row)[:6])}. Force a format with --format: {', '.join(get_args(InputFormat))}."
    )


def _common_root(folders: Iterable[str]) -> str:
    """Returns the folder that ids are relative to: the deepest one that holds the folders of all inputs.

    It is empty if there is none, as for a local input and one at a URL.
    """
    found = dict.fromkeys(folders)
    return reduce(common_folder, found) if found else ""


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
            f"{len(options.tars)} patterns of tars for {len(inputs)} inputs. Give --tars once for all inputs, or once "
            "for each, in the same order."
        )
    tars = options.tars if len(options.tars) == len(inputs) else [*options.tars, None][:1] * len(inputs)
    forget_answers()
    parser = LhotseManifest("", FileNames.of((), (os.getcwd(),), os.getcwd()), options.channel)
    found = [
        open_objects(given, parser) or _detect_input(GivenInput(given, options, number, pattern))
        for number, (given, pattern) in enumerate(zip(inputs, tars, strict=True))
    ]
    root = _common_root(detected.folder for detected in found if isinstance(detected, _DetectedInput))
    sources: list[Source] = []
    for detected in found:
        opened = detected.source(root) if isinstance(detected, _DetectedInput) else detected
        if isinstance(opened, AudioFiles) and sources and isinstance(sources[-1], AudioFiles):
            sources[-1].named.extend(opened.named)
        elif isinstance(opened, Sequence):
            sources.extend(opened)
        else:
            sources.append(opened)
    return sources


def _check_format(given: GivenInput) -> None:
    """Raises ManifestError if an input is named like tars or a pattern, which the given format does not read."""
    if given.format in (None, "parquet"):
        return
    if given.is_tars and given.format != "webdataset":
        raise ManifestError(
            f"{given.path}: a tar, which --format {given.format} does not read. Give the manifest, and the tars with "
            "--tars, or leave out --format to read it as WebDataset."
        )
    if given.is_pattern and given.format != "nemo" and not given.is_tars:
        raise ManifestError(f"{given.path}: a pattern of manifests, which is read for NeMo data sets only.")
