"""Reads `meta.json`, arrays and lines of a corpus directory, and checks them, because it may come from somebody else.

`meta.json` holds format version, counts and settings. It is written last, and makes a directory a corpus. A part that
is damaged or does not fit the others is a ValueError.
"""

import json
import math
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.errors import CorpusError

FORMAT_VERSION = 4
_META_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "sampling_rate": int,
    "num_cuts": int,
    "num_bytes": int,
    "hours": (int, float),
    "fingerprint": str,
}
_SHARD_TYPES: Mapping[str, type] = {"root": str, "has_urls": bool, "has_checksums": bool}


def read_meta(directory: Path) -> dict[str, Any]:
    """Returns the content of `meta.json`, after checking the fields that are used.

    Raises:
        CorpusError: The corpus has another format version.
        OSError: The file cannot be read.
        ValueError: The file is damaged.
    """
    path = directory / "meta.json"
    try:
        meta: dict[str, Any] = json.loads(path.read_bytes())
        int(meta["format_version"])
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error
    if meta["format_version"] != FORMAT_VERSION:
        raise CorpusError(
            f"{directory}: written in format {meta['format_version']}, but this version reads format "
            f"{FORMAT_VERSION}. Prepare it again."
        )
    _check_types(meta, _META_TYPES)
    if not 1 <= meta["sampling_rate"] < 1 << 31:
        raise ValueError(f"sampling_rate is {meta['sampling_rate']}")
    if "shards" in meta:
        _check_types(meta, {"root": str, "shards": dict})
        _check_types(meta["shards"], _SHARD_TYPES)
    return meta


def meta_content(meta: Mapping[str, Any]) -> bytes:
    """Returns the content of `meta.json` as it is written."""
    return (json.dumps(meta, indent=2, default=str) + "\n").encode()


def _check_types(fields: Mapping[str, Any], types: Mapping[str, type | tuple[type, ...]]) -> None:
    for name, kind in types.items():
        value = fields.get(name)
        # True and False are integers in Python.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{name} is {value!r:.100}")


def map_array(path: Path, dtype: Any, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
    """Memory-maps an array; as a plain array, because elements of a memmap are read more slowly.

    Args:
        path: A file of NumPy.
        dtype: The type that its elements must have.
        shape: The shape that it must have; None for any number of elements in one dimension.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        values = np.asarray(np.load(path, mmap_mode="r"))
    except (ArithmeticError, EOFError, MemoryError, RecursionError, SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"{path.name} is not an array of NumPy: {error}") from error
    if values.dtype != dtype or (values.ndim != 1 if shape is None else values.shape != shape):
        raise ValueError(f"{path.name} has another type or size than meta.json says")
    return values


def parse_line(line: bytes, rate: int) -> dict[str, Any]:
    """Returns the cut of a line of `cuts.jsonl` as a dict, if its fields have the types that loading relies on.

    Args:
        line: Bytes of one line, which may come from an untrusted file.
        rate: Sampling rate of the corpus in Hz.
    """
    cut: dict[str, Any] = orjson.loads(line)
    try:
        recording = cut["recording"]
        is_valid = (
            isinstance(cut["id"], str)
            and isinstance(cut["channel"], int)
            and all(map(_is_length, (cut["start"], cut["duration"], recording["duration"])))
            and recording["sampling_rate"] == rate
            and len(recording["sources"]) > 0
            and all(map(_is_source, recording["sources"]))
            and isinstance(recording.get("transforms") or [], list)
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a cut: {type(error).__name__}: {error}") from error
    if not is_valid:
        raise ValueError("not a cut of this corpus")
    return cut


def _is_source(source: Mapping[str, Any]) -> bool:
    return (
        isinstance(source["type"], str) and isinstance(source["source"], str) and isinstance(source["channels"], list)
    )


def _is_length(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf
