"""`metrics.csv`, in a folder `version_N` that belongs to one start of a run."""

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor

from nestdata.output import replace_file, write_all

METRICS = "metrics.csv"
_VERSION = re.compile(r"version_(\d{1,9})")


class MetricsFile(CSVLogger):
    """Writes metrics to `metrics.csv` as they are logged. A full disk loses no line and does not end the run.

    What cannot be written is kept, with one warning, and written with the lines that follow. Lightning's own logger
    raises the error, and its file ends with half a line or, if a new column has appeared, is empty.

    Args:
        root: Output folder, in which the folder of this start is made.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root, name="")
        self._root = Path(root)
        self._claimed: Path | None = None
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._has_warned = False

    @property
    def version(self) -> int:
        """Number of this start. Until `claim` has made its folder, the next number that the output folder has free."""
        if self._claimed is None:
            return self._next_version()
        return int(self._claimed.name.removeprefix("version_"))

    def claim(self) -> Path:
        """Makes the folder of this start, which no other start uses, at the first call; returns it. For rank 0."""
        if self._claimed is None:
            self._root.mkdir(parents=True, exist_ok=True)
            for number in count(self._next_version()):
                try:
                    (self._root / f"version_{number}").mkdir()
                except FileExistsError:  # another start has just made it
                    continue
                self._claimed = self._root / f"version_{number}"
                break
        assert self._claimed is not None
        return self._claimed

    @property
    def experiment(self) -> "MetricsFile":
        """This logger; Lightning asks for it on every rank, so that the folder exists."""
        if getattr(rank_zero_only, "rank", 0) == 0:
            self.claim()
        return self

    def _next_version(self) -> int:
        found = map(_VERSION.fullmatch, os.listdir(self._root) if self._root.is_dir() else [])
        return max((int(match[1]) + 1 for match in found if match), default=0)

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Does nothing: `config.yaml` has the settings."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Tensor | float], step: int | None = None) -> None:
        """Adds a line."""
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        self._rows.append({**values, "step": len(self._rows) if step is None else step})

    @rank_zero_only
    def save(self) -> None:
        """Writes the lines that were added."""
        if not self._rows:
            return
        columns = sorted({*self._columns, *(name for row in self._rows for name in row)})
        try:
            path = self.claim() / METRICS
            if columns == self._columns:
                _append(path, csv_lines(columns, self._rows))
            else:
                replace_file(path, csv_lines(columns, [*_rows_of(path), *self._rows], header=True))
        except OSError as error:
            if not self._has_warned:
                rank_zero_warn(
                    f"{self.log_dir}/{METRICS}: cannot be written ({error.strerror}). Training continues, and the "
                    "lines follow when it can."
                )
            self._has_warned = True
            return
        self._columns, self._rows, self._has_warned = columns, [], False

    @rank_zero_only
    def finalize(self, status: str) -> None:  # noqa: ARG002
        """Writes what is left."""
        self.save()


def csv_lines(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], *, header: bool = False) -> bytes:
    """Returns rows as lines of CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _rows_of(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _append(path: Path, content: bytes) -> None:
    """Adds lines to a file; if this fails, the file is as before."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            write_all(file, content)
        except OSError:
            file.truncate(size)
            raise
