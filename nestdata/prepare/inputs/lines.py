"""Lines of manifests: a path or a URL, gzip-compressed or not."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import orjson

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.entry import count_lines, open_lines
from nestdata.storage import is_url


class LineSource:
    """The methods of `Source` for a manifest of which each line is an item."""

    items_per_task: ClassVar[None] = None
    num_header_lines: ClassVar[int] = 0
    path: Path | str

    def items(self) -> Iterator[bytes]:
        """Yields the lines after the header."""
        with open_lines(self.path) as file:
            yield from islice(file, self.num_header_lines, None)

    def where(self, number: int) -> str:
        """Returns the path and the line number, counted from 1 with the header."""
        return f"{self.path!s}:{number + self.num_header_lines}"

    def count(self) -> int | None:
        """Returns the number of lines after the header."""
        lines = count_lines(self.path)
        return None if lines is None else lines - self.num_header_lines


def numbered_lines(location: str) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a manifest with their numbers, counted from 1.

    Raises:
        ManifestError: It is not a regular file, or is damaged.
        StorageError: The store cannot be read.
    """
    with open_lines(location if is_url(location) else Path(location)) as file:
        yield from enumerate(file, start=1)


def parse_object(line: bytes, path: Path | str, number: int) -> dict[str, Any] | None:
    """Parses one line; returns None for a blank one.

    Raises:
        ManifestError: It is not a JSON object.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if not line.strip():
            return None
        try:
            row = json.loads(line)  # accepts NaN, which Python writes for missing scores
        except (ValueError, RecursionError):
            raise ManifestError(
                f"{path}:{number}: not JSON ({error.msg}, at character {error.pos + 1}). Every line must be one JSON "
                "object; fix or drop it."
            ) from error
    if not isinstance(row, dict):
        raise ManifestError(f"{path}:{number}: {type(row).__name__} where a JSON object was expected. Fix or drop it.")
    return row
