"""The list of the formats of inputs, which imports none of their readers, so that settings and help start fast.

A format is one entry here, and one reader in `nestdata.prepare.inputs.formats`.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

InputKind = Literal["tars", "manifests", "folder", "audio", "manifest"]
"""A tar or a pattern of tars, another pattern, a folder, an audio file, or any other file."""


class ListedFormat(NamedTuple):
    """A format of inputs."""

    title: str
    """What help calls such inputs."""

    reader: str
    """The function that opens them: its module in `nestdata.prepare.inputs.formats`, and its name."""

    kinds: tuple[InputKind, ...]
    """What such an input is, unless the caller says that an input has this format; empty for any kind."""


# In the order of detection: formats that are known by a suffix or by the first bytes come before those that guess.
FORMATS: dict[str, ListedFormat] = {
    "parquet": ListedFormat("Parquet files", "huggingface.open_parquet", ()),
    "fairseq": ListedFormat("fairseq manifests", "path_list.open_fairseq", ("manifest",)),
    "csv": ListedFormat("CSV tables", "table.open_table", ("manifest",)),
    "list": ListedFormat("lists of paths", "path_list.open_list", ("manifest",)),
    "nemo": ListedFormat("NeMo manifests", "nemo.open_nemo", ("manifest", "manifests")),
    "lhotse": ListedFormat("Lhotse manifests", "lhotse.open_lhotse", ("manifest", "folder")),
    "kaldi": ListedFormat("local Kaldi directories", "kaldi.open_kaldi", ("folder",)),
    "huggingface": ListedFormat("local Hugging Face data sets", "huggingface.open_saved", ("folder",)),
    "shar": ListedFormat("Lhotse Shar", "lhotse.open_shar", ("folder",)),
    "webdataset": ListedFormat("WebDataset tars", "webdataset.open_tars", ("tars",)),
    "audio": ListedFormat("audio files", "folder.open_file", ("audio",)),
    "folder": ListedFormat("folders of audio", "folder.open_folder", ("folder",)),
}
"""All formats by name."""

if TYPE_CHECKING:
    InputFormat = str
    """Name of a format of inputs: a key of `FORMATS`."""
else:
    InputFormat = Literal[tuple(FORMATS)]
