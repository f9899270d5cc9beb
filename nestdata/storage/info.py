"""What is known of an object without reading it, and the counters of what was read."""

import threading
from typing import NamedTuple


class ObjectInfo(NamedTuple):
    """One object of a store, or one local file."""

    location: str
    size: int
    """Length in bytes."""

    etag: str | None
    """The store's identifier of this content, without quotes. None for local files and for servers that give none."""


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
        self._total = StorageStats()

    def add(
        self,
        *,
        requests: int = 0,
        retries: int = 0,
        bytes_read: int = 0,
        bytes_written: int = 0,
        seconds_waited: float = 0.0,
    ) -> None:
        """Adds counts."""
        with self._lock:
            old = self._total
            self._total = StorageStats(
                old.requests + requests,
                old.retries + retries,
                old.bytes_read + bytes_read,
                old.bytes_written + bytes_written,
                old.seconds_waited + seconds_waited,
            )

    def total(self) -> StorageStats:
        """Returns the counts so far."""
        return self._total

    def replace_lock(self) -> None:
        """Makes the counter usable in a forked child, whose copy of the lock may be held by a thread of the parent."""
        self._lock = threading.Lock()
