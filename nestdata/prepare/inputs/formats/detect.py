"""Finds the format of each input of a corpus, and opens the inputs as sources."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from nestdata.errors import ConfigError, ManifestError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import Source
from nestdata.prepare.inputs.format import Format, GivenInput, InputOptions
from nestdata.prepare.inputs.formats import (
    fairseq,
    folder,
    huggingface,
    kaldi,
    lhotse,
    nemo,
    path_list,
    shar,
    table,
    webdataset,
)
from nestdata.prepare.inputs.formats.folder import AudioFiles
from nestdata.prepare.inputs.formats.lhotse import open_objects
from nestdata.prepare.inputs.patterns import forget_answers
from nestdata.storage import common_folder
from nestdata.wrong_path import kind_of, wrong_path

# In the order in which they are asked. The kind of an input and its first line are read once for all of them.
FORMATS: tuple[Format, ...] = (
    huggingface.PARQUET_FORMAT,
    fairseq.FORMAT,
    table.FORMAT,
    path_list.FORMAT,
    nemo.FORMAT,
    lhotse.FORMAT,
    kaldi.FORMAT,
    huggingface.FORMAT,
    shar.FORMAT,
    webdataset.FORMAT,
    folder.FILE_FORMAT,
    folder.FORMAT,
)


def detect_format(given: GivenInput) -> Format:
    """Returns the format of an input, for which its manifest is opened at most once.

    Raises:
        ManifestError: The input does not exist, is not a file or folder, is empty, is of an unknown format, or cannot
            be of the given one.
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
    if given.format is None and str(given.path).lower().endswith((".yaml", ".yml")):
        raise ManifestError(
            f"{given.path}: a configuration, such as an input_cfg of NeMo. Give each manifest in it as an argument of "
            "its own, and their tars with --tars."
        )
    if given.format is None and isinstance(given.path, Path) and kind_of(given.path) == "a model file":
        raise ManifestError(f"{given.path}: {wrong_path(given.path, 'audio')}")
    for form in FORMATS:
        if form.name == given.format or (given.format is None and form.detect(given)):
            return form
    raise ManifestError(
        f"{given.path}:{given.lines.number}: neither a NeMo line (no audio_filepath) nor a Lhotse cut or recording; "
        f"its keys are: {', '.join(list(given.row)[:6])}. Say which one names the audio file, by --columns audio=KEY, "
        f"or force a format with --format: {', '.join(get_args(InputFormat))}."
    )


def common_root(folders: Iterable[str]) -> str:
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
            f"{len(options.tars)} patterns of tars for {len(inputs)} inputs. Give one for all inputs, or one for each, "
            "in the same order: --tars PATTERN PATTERN."
        )
    tars = options.tars if len(options.tars) == len(inputs) else [*options.tars, None][:1] * len(inputs)
    forget_answers()
    folders: list[str] = []
    openers: list[Callable[[str], Source | Sequence[Source]]] = []
    for number, (path, pattern) in enumerate(zip(inputs, tars, strict=True)):
        if source := open_objects(path, options.channel):
            openers.append(_always(source))
            continue
        given = GivenInput(path, options, number, pattern)
        folder_of_input, opener = detect_format(given).open(given)
        folders.append(folder_of_input)
        openers.append(opener)
    root = common_root(folders)
    sources: list[Source] = []
    for opener in openers:
        opened = opener(root)
        if isinstance(opened, AudioFiles) and sources and isinstance(sources[-1], AudioFiles):
            sources[-1].named.extend(opened.named)
        else:
            sources.extend(opened if isinstance(opened, Sequence) else [opened])
    return sources


def _always(source: Source) -> Callable[[str], Source]:
    return lambda _: source
