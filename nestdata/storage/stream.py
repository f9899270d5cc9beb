"""Streams of a known size, and sequential reading of an object in parts that threads request ahead."""

import io
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from nestdata.storage.storage_config import StorageConfig

Result = TypeVar("Result")
_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonPool:
    """Makes calls in threads, in the order in which they are submitted.

    The threads end with the process, even during a call. For the threads of a `ThreadPoolExecutor`, Python would wait
    at exit, for as long as a store does not answer.

    Args:
        num_threads: Largest number of calls at the same time.
        name: Name of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()

    def submit(self, call: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        """Returns the future of a call, which is not made if the future is cancelled before.

        Raises:
            RuntimeError: This process was forked from the one that owns the threads.
        """
        if os.getpid() != self._process:
            raise RuntimeError(f"the threads {self._name} belong to the process that this one was forked from.")
        future: Future[Result] = Future()
        self._calls.put((future, call, arguments))
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """Ends the threads after the calls that were submitted."""
        for _ in self._threads:
            self._calls.put(None)


def _work(calls: "SimpleQueue[_Call | None]") -> None:
    while _make_call(calls.get()):
        pass


def _make_call(call: _Call | None) -> bool:
    """Makes a call and returns True; False for None."""
    if call is None:
        return False
    future, function, arguments = call
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # such as a panic of obstore, after which the caller would wait forever
            future.set_exception(error)
    return True


class SizedStream(io.RawIOBase):
    """A readable, seekable stream of a known number of bytes. Subclasses read at `_position`, and move it.

    Args:
        size: Number of bytes.
        position: Where to begin, in bytes.
    """

    def __init__(self, size: int, position: int = 0) -> None:
        super().__init__()
        self._size = size
        self._position = position

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to another position; reads nothing."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position


class PartStream(SizedStream):
    """Reads an object from an offset to its end.

    Threads request the next parts while one is being read. After closing, no further requests are made; a stream that
    is no longer used closes itself. Not thread-safe. `seek` and `tell` work; a seek out of the parts that were
    requested drops them.
    """

    mode = "rb"
    """The mode of a file that is open for reading."""

    def __init__(
        self,
        fetch: Callable[[int, int], bytes],
        *,
        name: str,
        size: int,
        offset: int,
        config: StorageConfig,
    ) -> None:
        """Opens the stream; the first part is requested at the first read.

        Args:
            fetch: Returns the bytes of (offset, length).
            name: Location of the object.
            size: Size of the object in bytes.
            offset: Where to begin.
            config: Size and number of parts.
        """
        super().__init__(size, offset)
        self.name = name
        self._fetch = fetch
        self._config = config
        self._pool = DaemonPool(config.parts_ahead + 1, "nestdata-stream")
        self._parts: deque[tuple[int, Future[bytes]]] = deque()

    def readall(self) -> bytes:
        """Returns everything from here to the end."""
        parts = []
        while self._position < self._size:
            start, content = self._current_part()
            parts.append(content[self._position - start :])
            self._position = start + len(content)
        return b"".join(parts)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # Buffer came with Python 3.12
        """Fills a buffer as far as one part reaches, and returns the number of bytes: 0 at the end."""
        if self._position >= self._size or not len(buffer):
            return 0
        start, content = self._current_part()
        begin = self._position - start
        count = min(len(buffer), len(content) - begin)
        buffer[:count] = memoryview(content)[begin : begin + count]
        self._position += count
        return count

    def close(self) -> None:
        """Closes the stream; no further requests are made."""
        for _, part in self._parts:
            part.cancel()
        self._parts.clear()
        self._pool.close()
        super().close()

    def _current_part(self) -> tuple[int, bytes]:
        """Returns start and content of the part with the current position, and requests the next ones."""
        length = self._config.part_bytes
        while self._parts and not self._parts[0][0] <= self._position < self._parts[0][0] + length:
            self._parts.popleft()[1].cancel()
        following = self._parts[-1][0] + length if self._parts else self._position
        while len(self._parts) <= self._config.parts_ahead and following < self._size:
            part = self._pool.submit(self._fetch, following, min(length, self._size - following))
            self._parts.append((following, part))
            following += length
        start, part = self._parts[0]
        return start, part.result()
