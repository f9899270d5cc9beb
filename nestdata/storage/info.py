"""What is known of an object without reading it, and the counter of what was read."""

import os
from typing import NamedTuple

_LAST_NS = (1 << 63) - 1


class ObjectInfo(NamedTuple):
    """One object of a store, or one local file."""

    location: str
    size: int
    """Length in bytes."""

    etag: str | None
    """The store's identifier of this content, without quotes. None for local files and for servers that give none."""


class FileVersion(NamedTuple):
    """What distinguishes a local file from one that replaces it."""

    mtime_ns: int
    """Modification time, in ns since 1970; at most `_LAST_NS`, in 2262, as it is stored in 64 bits."""

    size: int
    """Lower 32 bits of the size in bytes."""

    @classmethod
    def of(cls, status: os.stat_result) -> "FileVersion":
        """Returns the version of a file with this status."""
        return cls(min(status.st_mtime_ns, _LAST_NS), status.st_size & 0xFFFFFFFF)


class StorageStats(NamedTuple):
    """Counters since a `Storage` was built."""

    bytes_read: int = 0
    """Bytes of ranges, streams and whole objects; streams of local files do not count."""
