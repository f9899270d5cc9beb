"""Parquet files with audio in a column, as the Hub stores them."""

import io
from pathlib import Path
from typing import Any

import pyarrow
import soundfile
from pyarrow import parquet

from tests.synthesis import Samples


def encoded(samples: Samples, form: str = "WAV", rate: int = 16000, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def write_parquet(path: Path, audio: list[dict[str, Any] | None], **labels: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table({"audio": pyarrow.array(audio, kind), **labels})
    parquet.write_table(table, path, row_group_size=2)
    return path


def embedded(samples: Samples, form: str = "FLAC") -> dict[str, Any]:
    return {"bytes": encoded(samples, form), "path": f"{len(samples)}.{form.lower()}"}
