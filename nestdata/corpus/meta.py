"""`meta.json`: format version, counts and settings of a corpus. It is written last, and makes a directory a corpus."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
