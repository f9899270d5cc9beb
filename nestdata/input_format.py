"""The list of the formats of inputs, which imports none of their readers, so that settings and help start fast.

A format is one entry here, and one `Format` in `nestdata.prepare.inputs.formats`.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple


class ListedFormat(NamedTuple):
    """A format of inputs."""

    title: str
    """What help calls such inputs."""

    reader: str
    """Its `Format`: the module in `nestdata.prepare.inputs.formats`, and the name in it."""


# In the order of detection: formats that are known by a suffix or by the first bytes come before those that guess.
FORMATS: dict[str, ListedFormat] = {
    "parquet": ListedFormat("Parquet files", "huggingface.PARQUET_FORMAT"),
    "fairseq": ListedFormat("fairseq manifests", "path_list.FAIRSEQ"),
    "csv": ListedFormat("CSV tables", "table.FORMAT"),
    "list": ListedFormat("lists of paths", "path_list.FORMAT"),
    "nemo": ListedFormat("NeMo manifests", "nemo.FORMAT"),
    "lhotse": ListedFormat("Lhotse manifests", "lhotse.FORMAT"),
    "kaldi": ListedFormat("local Kaldi directories", "kaldi.FORMAT"),
    "huggingface": ListedFormat("local Hugging Face data sets", "huggingface.FORMAT"),
    "shar": ListedFormat("Lhotse Shar", "shar.FORMAT"),
    "webdataset": ListedFormat("WebDataset tars", "webdataset.FORMAT"),
    "audio": ListedFormat("audio files", "folder.FILE_FORMAT"),
    "folder": ListedFormat("folders of audio", "folder.FORMAT"),
}
"""All formats by name."""

if TYPE_CHECKING:
    InputFormat = str
    """Name of a format of inputs: a key of `FORMATS`."""
else:
    InputFormat = Literal[tuple(FORMATS)]
