"""Opens detected inputs as sources of entries."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nestdata.corpus.channels import Channel
from nestdata.prepare.inputs.detect import DetectedInput, common_root, detect_input
from nestdata.prepare.inputs.entry import InputFormat, Source
from nestdata.prepare.inputs.fairseq import FairseqManifest
from nestdata.prepare.inputs.folder import AudioFolder
from nestdata.prepare.inputs.huggingface import HuggingFaceDataset
from nestdata.prepare.inputs.jsonl import LhotseManifest, NemoManifest
from nestdata.prepare.inputs.kaldi import KaldiDirectory


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


def open_sources(paths: Sequence[Path], options: InputOptions) -> list[Source]:
    """Detects and opens all inputs of one corpus.

    Ids are relative to the deepest folder that holds all manifests and folders of audio. For a fairseq
    manifest, this is the folder that it names, wherever the manifest itself is.

    Raises:
        ManifestError: An input does not exist, or is of no known format.
        ConfigError: An input needs a package that is not installed.
    """
    inputs = [detect_input(path, options.format) for path in paths]
    root = str(common_root(inputs))
    return [_open_source(found, root, str(number), options) for number, found in enumerate(inputs)]


def _open_source(found: DetectedInput, root: str, name: str, options: InputOptions) -> Source:
    match found.format:
        case "nemo":
            return NemoManifest(found.path, root, found.base)
        case "lhotse":
            return LhotseManifest(found.path, found.base, options.channel, options.allow_commands)
        case "fairseq":
            return FairseqManifest(found.path, root, found.base)
        case "kaldi":
            return KaldiDirectory(found.path, found.base, options.allow_commands, found.has_segments)
        case "huggingface":
            folders = {"extract_to": str(options.extract_to / name), "stored_in": str(options.stored_in / name)}
            return HuggingFaceDataset.open(found.path, found.version, found.base, root=root, **folders)
        case "folder":
            return AudioFolder(found.path, root)
