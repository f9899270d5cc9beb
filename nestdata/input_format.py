"""Formats of the inputs of `nestdata prepare`, in a module of their own, so that its help imports no readers."""

from typing import Literal

InputFormat = Literal[
    "audio",
    "folder",
    "list",
    "csv",
    "nemo",
    "lhotse",
    "fairseq",
    "kaldi",
    "huggingface",
    "parquet",
    "shar",
    "webdataset",
]
