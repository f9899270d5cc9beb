"""The list of the formats of inputs, which imports none of their readers, so that settings and help start fast.

A format is one entry here, and one reader in `nestdata.prepare.inputs.formats`.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple


class ListedFormat(NamedTuple):
    """A format of inputs."""

    title: str
    """What help calls such inputs."""

    reader: str
    """The function that opens them: its module in `nestdata.prepare.inputs.formats`, and its name."""


# In the order of detection: formats that are known by a suffix or by the first bytes come before those that guess.
FORMATS: dict[str, ListedFormat] = {
    "parquet": ListedFormat("Parquet files", "huggingface.open_parquet"),
    "fairseq": ListedFormat("fairseq manifests", "path_list.open_fairseq"),
    "csv": ListedFormat("CSV tables", "table.open_table"),
    "list": ListedFormat("lists of paths", "path_list.open_list"),
    "nemo": ListedFormat("NeMo manifests", "nemo.open_nemo"),
    "lhotse": ListedFormat("Lhotse manifests", "lhotse.open_lhotse"),
    "kaldi": ListedFormat("local Kaldi directories", "kaldi.open_kaldi"),
    "huggingface": ListedFormat("local Hugging Face data sets", "huggingface.open_saved"),
    "shar": ListedFormat("Lhotse Shar", "lhotse.open_shar"),
    "webdataset": ListedFormat("WebDataset tars", "webdataset.open_tars"),
    "audio": ListedFormat("audio files", "folder.open_file"),
    "folder": ListedFormat("folders of audio", "folder.open_folder"),
}
"""All formats by name."""

if TYPE_CHECKING:
    InputFormat = str
    """Name of a format of inputs: a key of `FORMATS`."""
else:
    InputFormat = Literal[tuple(FORMATS)]
