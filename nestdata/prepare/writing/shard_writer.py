"""Writes `shards.jsonl` and `shards.npy`: the files and objects that the addresses of a corpus refer to.

Shards are numbered in the order of first use. The memory does not depend on their number, for a corpus of whole remote
files has one shard per file: lines wait in a temporary file, and only the numbers of the most recent shards are known.
A shard that is used again after very many others therefore gets a second line, which changes nothing but that line.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.corpus.addresses import NO_SHARD, relative_name
from nestdata.errors import ManifestError
from nestdata.storage import ObjectInfo, common_folder, is_url, parent

# Number of shards whose numbers are known, at about 100 bytes each.
_MAX_KNOWN = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardStats:
    """The shards of a corpus that was written."""

    num_shards: int
    root: str
    """The deepest folder that holds all shards, which their names are relative to; empty if there is none."""

    has_urls: bool
    """Whether any shard was an object of a store."""

    has_checksums: bool
    """Whether the checksums of all addresses are known."""


class ShardWriter:
    """Numbers the shards of one corpus, and writes their files."""

    def __init__(self, directory: Path) -> None:
        self.num_shards = 0
        self._directory = directory
        self._known: dict[bytes, int] = {}
        self._root: str | None = None
        self._has_urls = False
        self._files = ExitStack()
        self._files.callback((directory / "shards.tmp").unlink, missing_ok=True)
        self._waiting = self._files.enter_context((directory / "shards.tmp").open("w+b"))

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def add(self, shards: list[ObjectInfo], extents: NDArray[np.uint64]) -> None:
        """Adds shards, and replaces the numbers in the upper 32 bits of extents, which are indices of `shards`.

        Raises:
            ManifestError: There are more shards than addresses can number.
        """
        if not shards:
            return
        numbers = np.array([self._number_of(shard) for shard in shards], np.uint64)
        has_shard = extents >> np.uint64(32) != NO_SHARD
        own = extents[has_shard]
        extents[has_shard] = numbers[own >> np.uint64(32)] << np.uint64(32) | own & np.uint64(0xFFFFFFFF)

    def finish(self, extents: Iterable[NDArray[np.uint64]], *, has_checksums: bool) -> ShardStats | None:
        """Writes the files, with the number of addresses of each shard.

        Args:
            extents: The shards of all cuts that are left, in the upper 32 bits, in blocks.
            has_checksums: Whether the checksums of all addresses are known.

        Returns:
            The statistics of the shards, or None if there are none and thus no files.
        """
        if not self.num_shards:
            return None
        counts = np.zeros(self.num_shards, np.int64)
        for block in extents:
            numbers = block >> np.uint64(32)
            np.add.at(counts, numbers[numbers != NO_SHARD].astype(np.int64), 1)
        root = self._root or ""
        self._write(root, counts)
        return ShardStats(num_shards=self.num_shards, root=root, has_urls=self._has_urls, has_checksums=has_checksums)

    def _number_of(self, shard: ObjectInfo) -> int:
        digest = blake2b(repr(tuple(shard)).encode("utf-8", "surrogateescape"), digest_size=16).digest()
        number = self._known.get(digest)
        if number is not None:
            return number
        if self.num_shards >= NO_SHARD:
            raise ManifestError(f"more than {NO_SHARD} files and objects. Divide the input into several corpora.")
        if len(self._known) >= _MAX_KNOWN:
            del self._known[next(iter(self._known))]  # the oldest
        number = self._known[digest] = self.num_shards
        self.num_shards += 1
        folder = parent(shard.location)
        self._root = folder if self._root is None else common_folder(self._root, folder)
        self._has_urls |= is_url(shard.location)
        self._waiting.write(orjson.dumps(tuple(shard), option=orjson.OPT_APPEND_NEWLINE))
        return number

    def _write(self, root: str, counts: NDArray[np.int64]) -> None:
        self._waiting.seek(0)
        start = 0
        with (
            (self._directory / "shards.jsonl").open("wb") as file,
            (self._directory / "shards.npy").open("wb") as starts,
        ):
            header = {"descr": "<i8", "fortran_order": False, "shape": (self.num_shards + 1,)}
            np.lib.format.write_array_header_1_0(starts, header)
            starts.write(start.to_bytes(8, "little"))
            for number, line in enumerate(self._waiting):
                location, size, etag = orjson.loads(line)
                row: dict[str, Any] = {"name": relative_name(location, root), "size": size, "etag": etag}
                content = orjson.dumps(row | {"members": int(counts[number])}, option=orjson.OPT_APPEND_NEWLINE)
                start += file.write(content)
                starts.write(start.to_bytes(8, "little"))
