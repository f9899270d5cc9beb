"""What is known of an object without reading it, and the counters of what was read."""

import os
import threading
from typing import NamedTuple


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
    """Modification time, in ns since 1970."""

    size: int
    """Lower 32 bits of the size in bytes."""

    @classmethod
    def of(cls, status: os.stat_result) -> "FileVersion":
        """Returns the version of a file with this status."""
        return cls(status.st_mtime_ns, status.st_size & 0xFFFFFFFF)


class StorageStats(NamedTuple):
    """Counters since a `Storage` was built. Local files count in `requests` and `bytes_read` only."""

    requests: int = 0
    """Requests that were answered or failed, repeated ones included."""

    retries: int = 0
    """Requests that repeated one that had failed for a transient reason."""

    bytes_read: int = 0
    bytes_written: int = 0
    seconds_waited: float = 0.0
    """Time that callers spent in requests and in pauses between them, summed over threads."""


class StatsCounter:
    """Sums of `StorageStats`, added to by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total: dict[str, int | float] = dict(StorageStats()._asdict())

    def add(self, **counts: int | float) -> None:
        """Adds counts, by field of `StorageStats`."""
        with self._lock:
            for name, count in counts.items():
                self._total[name] += count

    def total(self) -> StorageStats:
        """Returns the counts so far."""
        return StorageStats(**self._total)  # type: ignore[arg-type]  # counts are integers where the fields are

    def replace_lock(self) -> None:
        """Makes the counter usable in a forked child, whose copy of the lock may be held by a thread of the parent."""
        self._lock = threading.Lock()
