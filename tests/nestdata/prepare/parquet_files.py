"""Parquet files with audio in a column, as the Hub stores them."""

from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from tests.synthesis import Samples, encoded


def write_parquet(path: Path, audio: list[dict[str, Any] | None], **labels: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table({"audio": pyarrow.array(audio, kind), **labels})
    parquet.write_table(table, path, row_group_size=2)
    return path


def embedded(samples: Samples, form: str = "FLAC") -> dict[str, Any]:
    return {"bytes": encoded(samples, form), "path": f"{len(samples)}.{form.lower()}"}
