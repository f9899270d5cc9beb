"""Opens detected inputs as sources of entries."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestdata.corpus.channels import Channel
from nestdata.errors import ConfigError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.audio_files import AudioFiles
from nestdata.prepare.inputs.detect import DetectedInput, common_root, detect_input
from nestdata.prepare.inputs.detect_shards import ShardInput
from nestdata.prepare.inputs.entry import Source
from nestdata.prepare.inputs.fairseq import FairseqManifest
from nestdata.prepare.inputs.folder import AudioFolder, BucketFolder
from nestdata.prepare.inputs.given import CorpusCuts, open_objects
from nestdata.prepare.inputs.huggingface import HuggingFaceDataset
from nestdata.prepare.inputs.jsonl import LhotseManifest, NemoManifest
from nestdata.prepare.inputs.kaldi import KaldiDirectory
from nestdata.prepare.inputs.listing import forget_answers
from nestdata.prepare.inputs.nemo_tarred import NemoTarred
from nestdata.prepare.inputs.parquet import ParquetFiles
from nestdata.prepare.inputs.path_list import PathList
from nestdata.prepare.inputs.shar import SharDirectory
from nestdata.prepare.inputs.table import Table
from nestdata.prepare.inputs.webdataset import WebDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class InputOptions:
    """Settings that apply to all inputs of one corpus."""

    format: InputFormat | None = None
    """Format of every input; None to detect it."""

    channel: Channel = 0
    """Channel of recordings whose manifest names none."""

    allow_commands: bool = False
    """Whether to run commands that a manifest gives instead of files."""

    extract_to: Path = Path("audio")
    """Folder that embedded audio is written to, in a subfolder for each input."""

    stored_in: Path = Path("audio")
    """Path of the same folder once the corpus is in place."""

    tars: tuple[str, ...] = ()
    """Patterns of the tars of NeMo manifests: none to find them beside the manifests, one for all inputs, or one for
    each input."""

    scratch: Path = Path("lines")
    """Start of the name of the folder for temporary files of each input."""

    shards: Path = Path("shards")
    """Folder that tars of audio from Parquet files are written to, in a subfolder for each input."""

    stored_shards: Path = Path("shards")
    """Path of the same folder once the corpus is in place."""


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
    parser = LhotseManifest("", os.getcwd(), options.channel, options.allow_commands)
    opened = [open_objects(given, parser) for given in inputs]
    found = [
        None if source else detect_input(given, options.format, pattern)
        for source, given, pattern in zip(opened, inputs, tars, strict=True)
    ]
    root = common_root([one for one in found if one])
    sources: list[Source] = []
    for number, (source, one) in enumerate(zip(opened, found, strict=True)):
        if one is None:
            assert source
            sources.append(source)
        elif one.format != "audio":
            sources.append(_open_source(one, root, str(number), options))
        elif sources and isinstance(sources[-1], AudioFiles):
            sources[-1].named.append(one.path)
        else:
            sources.append(AudioFiles(one.path, root, [one.path]))
    return sources


def _open_source(found: DetectedInput, root: str, name: str, options: InputOptions) -> Source:
    if found.shards:
        return _open_shards(found, found.shards, root, name, options)
    if found.is_corpus:
        parser = LhotseManifest(Path(found.path) / "cuts.jsonl", os.getcwd(), options.channel, options.allow_commands)
        return CorpusCuts(Path(found.path), None, parser)
    match found.format:
        case "list":
            return PathList(found.path, root, found.base)
        case "csv":
            assert found.columns
            return Table(found.path, root, found.base, found.columns)
        case "nemo":
            return NemoManifest(found.path, root, found.base)
        case "lhotse":
            return LhotseManifest(found.path, found.base, options.channel, options.allow_commands)
        case "fairseq":
            return FairseqManifest(found.path, root, found.base)
        case "kaldi":
            return KaldiDirectory(Path(found.path), found.base, options.allow_commands, found.has_segments)
        case "huggingface":
            folders = {"extract_to": str(options.extract_to / name), "stored_in": str(options.stored_in / name)}
            return HuggingFaceDataset.open(Path(found.path), found.version, found.base, root=root, **folders)
        case "parquet":
            folders = {"write_to": str(options.shards / name), "stored_in": str(options.stored_shards / name)}
            return ParquetFiles(found.path, found.folder, root, **folders)
        case "folder":
            return BucketFolder(found.path, root) if isinstance(found.path, str) else AudioFolder(found.path, root)
        case _:
            raise AssertionError(f"{found.format} has shards")


def _open_shards(found: DetectedInput, shards: ShardInput, root: str, name: str, options: InputOptions) -> Source:
    if shards.format == "nemo":
        return NemoTarred(
            path=found.path,
            manifests=shards.manifests,
            tars=shards.tars,
            is_sharded=shards.is_sharded,
            folder=shards.folder,
            root=root,
            scratch=f"{options.scratch}.{name}",
        )
    if shards.is_packed:
        from nestdata.prepare.inputs.packed import PackedShar  # imports numpy, which `--help` can do without

        return PackedShar(found.path, shards.folder)
    if shards.format == "shar":
        parser = LhotseManifest(found.path, found.base, options.channel, options.allow_commands)
        return SharDirectory(found.path, shards.shar, parser)
    return WebDataset(found.path, tuple(tar for _, tar in shards.tars), shards.folder, root)
