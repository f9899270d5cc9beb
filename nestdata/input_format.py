"""Formats of the inputs of `nestdata prepare`, in a module of their own so that its help needs no reader of them."""

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
