"""Streams of a known size, and sequential reading of an object in parts that are requested ahead."""

import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from nestdata.storage.storage_config import StorageConfig
from nestdata.storage.threads import DaemonPool


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
