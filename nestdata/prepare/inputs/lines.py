"""Lines of manifests by location: a path or a URL, gzip-compressed or not."""

from collections.abc import Iterator
from pathlib import Path

from nestdata.prepare.inputs.entry import open_lines
from nestdata.storage import is_url


def numbered_lines(location: str) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a manifest with their numbers, counted from 1.

    Raises:
        ManifestError: It is not a regular file, or is damaged.
        StorageError: The store cannot be read.
    """
    with open_lines(location if is_url(location) else Path(location)) as file:
        yield from enumerate(file, start=1)
