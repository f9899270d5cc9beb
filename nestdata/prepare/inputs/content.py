"""The bytes of an audio file in a shard, in memory or read when they are needed."""

import io
from dataclasses import dataclass, field
from io import BufferedIOBase, BytesIO
from typing import Any

from nestdata.errors import StorageError
from nestdata.storage import SizedStream, is_url, storage

# Bytes that are read at a time. A header needs a few kilobytes; a request to a store costs as much as half a megabyte.
_LOCAL_BUFFER, _REMOTE_BUFFER = 1 << 14, 1 << 18
HEAD_BYTES = 1 << 14
"""Bytes from the start of an audio file that hold its header, with 8 KiB of padding that the `flac` program writes."""


@dataclass(frozen=True, slots=True)
class LoadedContent:
    """Bytes in memory."""

    content: bytes

    def head(self) -> bytes:
        """Returns the bytes."""
        return self.content

    def open(self) -> BufferedIOBase:
        """Returns a stream of the bytes."""
        return BytesIO(self.content)

    def read(self) -> bytes:
        """Returns the bytes."""
        return self.content


@dataclass(frozen=True, slots=True)
class StoredContent:
    """Bytes of a file or object, read when they are needed."""

    location: str
    offset: int
    length: int
    etag: str | None = None
    size: int | None = None
    """Size of the whole file or object, if it is known; another one is an error."""

    start: bytes = field(default=b"", repr=False)
    """The first bytes, if they have been read already."""

    def head(self) -> bytes:
        """Returns the first `HEAD_BYTES`, or all bytes if there are fewer; errors are those of `Storage.read_range`."""
        return self.start or self.read_range(0, min(self.length, HEAD_BYTES))

    def open(self) -> BufferedIOBase:
        """Returns a seekable stream that reads what is asked for.

        The first bytes are read now, and only once: soundfile holds a lock of the whole process while it opens a
        stream, and a request there would keep all threads from opening files. Longer files whose end is examined when
        they are opened, such as MP3, still lead to requests under the lock. Errors, now and later, are those of
        `Storage.read_range`.
        """
        size = _REMOTE_BUFFER if is_url(self.location) else _LOCAL_BUFFER
        wanted = min(self.length, size)
        first = self.start if len(self.start) >= wanted else self.read_range(0, wanted)
        return io.BufferedReader(_RangeReader(self, first), size)

    def read(self) -> bytes:
        """Returns all bytes; errors are those of `Storage.read_range`."""
        return self.start if len(self.start) == self.length else self.read_range(0, self.length)

    def read_range(self, start: int, length: int) -> bytes:
        """Returns a range of the bytes; errors are those of `Storage.read_range`."""
        return storage().read_range(self.location, self.offset + start, length, etag=self.etag, size=self.size)


class _RangeReader(SizedStream):
    """A seekable stream of the bytes of a `StoredContent`, which keeps the first bytes and those that it read last.

    libsndfile seeks to the end and back while it opens a file, and `io.BufferedReader` then drops its buffer.
    """

    def __init__(self, content: StoredContent, first: bytes) -> None:
        super().__init__(content.length)
        self._content = content
        self._kept = [(0, first), (0, first)]

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the standard library says WriteableBuffer
        num_bytes = min(len(buffer), self._size - self._position)
        if num_bytes <= 0:
            return 0
        found = self._find(num_bytes)
        if not found:
            found = self._content.read_range(self._position, num_bytes)
            self._kept[1] = self._position, found
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _find(self, num_bytes: int) -> bytes:
        """Returns up to a number of bytes at the position, as far as they are kept."""
        for start, kept in self._kept:
            if found := kept[self._position - start :][:num_bytes] if self._position >= start else b"":
                return found
        return b""


Content = LoadedContent | StoredContent


class GuardedStream:
    """A stream for libsndfile, which loses the errors of the streams that it reads.

    After an error, the stream is at its end. `check` raises the error.
    """

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._error: Exception | None = None

    def read(self, num_bytes: int) -> bytes:
        """Reads bytes; none after an error."""
        try:
            return b"" if self._error else self._stream.read(num_bytes)
        except (StorageError, OSError) as error:
            self._error = error
            return b""

    def readinto(self, buffer: Any) -> int:
        """Reads bytes into a buffer of libsndfile; none after an error."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position. One before the start, which damaged headers ask for, is the start."""
        return self._stream.seek(max(0, offset) if whence == io.SEEK_SET else offset, whence)

    def tell(self) -> int:
        """Returns the position."""
        return self._stream.tell()

    def check(self) -> None:
        """Raises the first error of a read."""
        if self._error:
            raise self._error
