"""Addresses: where the bytes of the audio of each cut are, for corpora whose audio is in tars or object stores.

A shard is a file or object that holds audio. A member is the bytes of one audio file in it; a whole file is a shard of
one member.

    addresses.npy    `ADDRESS` (num_cuts,), in the order of index.npy: shard, byte offset in it, length in bytes
    checksums.npy    uint32 (num_cuts,), crc32 of each member; only if all are known
    shards.jsonl     one line per shard: name (relative to the root, or absolute), size, ETag, number of addresses
    shards.npy       int64 (num_shards + 1,): the byte at which each line of shards.jsonl starts, and its size

All files are memory-mapped, so opening them takes the same time for every size. Cuts that are read by the path in
their line have the shard `NO_SHARD`.
"""

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.corpus.meta import map_array
from nestdata.storage import ObjectInfo, Storage, join

ADDRESS = np.dtype([("offset", "<i8"), ("shard", "<u4"), ("length", "<u4")])
"""A row of `addresses.npy`."""

NO_SHARD = 0xFFFFFFFF
"""Shard number of cuts without an address; also the largest value of 32 bits."""

# Descriptions of shards that a process keeps. Reading and parsing one again takes about 3 microseconds.
_MAX_CACHED = 8192


class Address(NamedTuple):
    """The bytes of the audio file of a cut."""

    location: str
    """Absolute path or URL of the shard."""

    offset: int
    """First byte in the shard."""

    length: int
    """Number of bytes."""

    shard_size: int
    """Size of the shard in bytes when the corpus was prepared."""

    etag: str | None
    """ETag of the shard when the corpus was prepared; None if the store gives none."""

    crc32: int | None
    """Checksum of the bytes; None if they were not read when the corpus was prepared."""

    def read(self, store: Storage) -> bytes:
        """Returns the bytes as they arrive; raises StorageError if they cannot be read, or the shard has changed."""
        return store.read_range(self.location, self.offset, self.length, etag=self.etag, size=self.shard_size)


class Shard(NamedTuple):
    """A file or object that holds audio of a corpus."""

    info: ObjectInfo
    """Location, size and ETag when the corpus was prepared."""

    num_addresses: int
    """Number of cuts whose audio is in this shard."""


class AddressTable:
    """The addresses of all cuts of a corpus, read from its directory."""

    def __init__(self, directory: Path, meta: Mapping[str, Any], root: str | None = None) -> None:
        """Opens the address files of a corpus directory; `open` explains the arguments and errors."""
        if root is None:
            # A relative root is a folder in the corpus directory, with which its audio is moved.
            root = join(str(directory.resolve()), meta["root"]) if meta["root"] else ""
        num_cuts, shards, checksums = meta["num_cuts"], meta["shards"], directory / "checksums.npy"
        self.root = root
        """The location that names of shards are relative to."""

        self.is_moved = root != shards["root"]
        """Whether the shards were elsewhere when the corpus was prepared. Their ETags are then unknown."""

        self._addresses = map_array(directory / "addresses.npy", ADDRESS, (num_cuts,))
        self._checksums = map_array(checksums, np.uint32, (num_cuts,)) if shards["has_checksums"] else None
        self._starts = map_array(directory / "shards.npy", np.int64)
        with (directory / "shards.jsonl").open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if not len(self._starts) or self._starts[-1] != len(self._lines):
            raise ValueError("shards.jsonl is not the size that shards.npy says")
        self._cached: dict[int, Shard] = {}

    @classmethod
    def open(cls, directory: Path, meta: Mapping[str, Any], root: str | None = None) -> "AddressTable | None":
        """Opens the address files of a corpus directory; returns None if the corpus has no addresses.

        Args:
            directory: The corpus directory.
            meta: The content of `meta.json`.
            root: The location that names of shards are relative to; by default, as in `meta`.

        Raises:
            OSError: A file is missing.
            ValueError: The files do not belong together.
        """
        return cls(directory, meta, root) if "shards" in meta else None

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self._starts) - 1

    def shard_numbers(self) -> NDArray[np.int64]:
        """Returns the number of the shard of every cut, shape (num_cuts,)."""
        return self._addresses["shard"].astype(np.int64)

    def __getitem__(self, index: int) -> Address | None:
        """Returns the address of a cut, or None if it is read by the path in its line.

        Raises:
            ValueError: The address or the line of its shard is damaged.
        """
        offset, number, length = self._addresses[index].item()
        if number == NO_SHARD:
            return None
        location, size, etag = self.shard(number).info
        if not 0 <= offset <= size - length:
            raise ValueError(f"addresses.npy gives bytes {offset} to {offset + length} of a shard of {size} bytes")
        return Address(
            location, offset, length, size, etag, None if self._checksums is None else int(self._checksums[index])
        )

    def shard(self, number: int) -> Shard:
        """Returns a shard by its number.

        Raises:
            ValueError: There is no such shard, or its line is damaged.
        """
        found = self._cached.get(number)
        if found is None:
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            found = self._cached[number] = self._read_shard(number)
        return found

    def shards(self) -> Iterator[Shard]:
        """Yields all shards in the order of their numbers; raises the same errors as `shard`."""
        return (self._read_shard(number) for number in range(self.num_shards))

    def _read_shard(self, number: int) -> Shard:
        if not 0 <= number < self.num_shards:
            raise ValueError(f"addresses.npy names shard {number} of {self.num_shards}")
        try:
            row = orjson.loads(self._lines[int(self._starts[number]) : int(self._starts[number + 1])])
            # A copy of an object has another ETag.
            info = ObjectInfo(join(self.root, row["name"]), int(row["size"]), None if self.is_moved else row["etag"])
            return Shard(info, int(row["members"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number + 1} of shards.jsonl is damaged: {error}") from error


def relative_name(location: str, root: str) -> str:
    """Returns the name of a shard in `shards.jsonl`: relative to the root, or absolute if it is outside of the root."""
    inside = root.rstrip("/") + "/"
    return location[len(inside) :] if root and location.startswith(inside) else location
