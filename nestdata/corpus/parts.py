"""Reads arrays and lines of a corpus directory, and checks them, because the directory may come from somebody else.

Every function raises ValueError for a part that is damaged or does not fit the others.
"""

import math
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

_NUMBERS = (int, float)


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
    return isinstance(value, _NUMBERS) and 0 <= value < math.inf
