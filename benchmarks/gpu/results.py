"""The rows of a measurement, one JSON object a line, written as soon as they are known."""

import json
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Results:
    """The file `results.jsonl` of a folder, to which several processes may add rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "results.jsonl"

    def put(self, **row: Any) -> None:
        """Adds a row."""
        line = json.dumps(row)
        print(line, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rows(self) -> list[Row]:
        """Returns all rows, without an unfinished line of a killed process."""
        found: list[Row] = []
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []:
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def has(self, **where: Any) -> bool:
        """Returns whether something was measured: whether a row has these values and is not an error or warning."""
        return any(
            all(row.get(name) == value for name, value in where.items())
            for row in self.rows()
            if not {"error", "warnings"} & row.keys()
        )

    @contextmanager
    def attempt(self, **where: Any) -> Iterator[None]:
        """Turns an error of the block, and warnings about kernels, into rows; the program goes on."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except Exception as error:
                traceback.print_exc()
                self.put(**where, error=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        texts = [(each.filename, " ".join(str(each.message).split())[:300]) for each in caught]
        ours = {text for filename, text in texts if "nestmodel" in filename or "kernel" in text.lower()}
        if ours:
            self.put(**where, warnings=sorted(ours))
