"""Bytes at positions of audio that is a file, in memory, or behind a seekable stream, and streams that splice them.

libsndfile reads a `SplicedStream` as if it were a file. So one stream of a joined file can be decoded by itself, and
MPEG frames without what is between them, without a copy of the file.
"""

import io
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

# What libsndfile's decoder of MPEG looks for at the end of a file: an ID3v1 tag.
_TAIL_BYTES = 128


class FileRanges:
    """Bytes of an open file; the file's own position does not move.

    libsndfile cannot be told of an exception. So after an error, the file has no bytes, and `check` raises the error.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._descriptor = descriptor
        self._error: OSError | None = None

    def at(self, start: int, length: int) -> bytes:
        """Returns the bytes of a range, fewer if the end comes first, and none after an error."""
        found = b""
        try:
            while not self._error and len(found) < length:
                more = os.pread(self._descriptor, length - len(found), start + len(found))
                if len(more) == length:
                    return more
                if not more:
                    break
                found += more
        except OSError as error:
            self._error = error
        return found

    def check(self) -> None:
        """Raises the first error of a read."""
        if self._error:
            raise self._error


class MemoryRanges:
    """Bytes in memory."""

    def __init__(self, content: bytes) -> None:
        self.size = len(content)
        self._content = content

    def at(self, start: int, length: int) -> bytes:
        """Returns the bytes of a range, fewer if the end comes first."""
        return self._content[start : start + length]


class StreamRanges:
    """Bytes of a seekable stream, whose position moves."""

    def __init__(self, stream: Any, size: int) -> None:
        self.size = size
        self._stream = stream

    def at(self, start: int, length: int) -> bytes:
        """Returns the bytes of a range, fewer if the end comes first."""
        self._stream.seek(start)
        found: bytes = self._stream.read(length)
        while len(found) < length and (more := self._stream.read(length - len(found))):
            found += more
        return found


ByteRanges = FileRanges | MemoryRanges | StreamRanges
"""Bytes of known number, read at any position."""

Piece = tuple[int, int] | bytes
"""First byte and length of a range, or bytes that stand for themselves."""


class SplicedStream:
    """A seekable stream of pieces one after the other, for libsndfile.

    The stream may claim to be longer than its pieces: libsndfile's decoder of MPEG estimates the number of samples from
    the size, and gives no more than it has estimated. A read behind the pieces is at the end of the stream.
    """

    def __init__(self, ranges: ByteRanges, pieces: Sequence[Piece], claimed_size: int = 0) -> None:
        self._ranges = ranges
        self._pieces = pieces
        self._starts = [0]
        for piece in pieces:
            length = len(piece) if isinstance(piece, bytes) else piece[1]
            self._starts.append(self._starts[-1] + length)
        self._size = max(self._starts[-1], claimed_size)
        self._position = 0
        self._index = 0

    def read(self, num_bytes: int) -> bytes:
        """Reads bytes, fewer at the end of the pieces."""
        position, end = self._position, self._starts[-1]
        if position >= end:
            # The tail that is claimed beyond the pieces is read for tags when a file is opened, and has none.
            found = bytes(min(num_bytes, self._size - position)) if position >= self._size - _TAIL_BYTES else b""
            self._position += len(found)
            return found
        parts = []
        while num_bytes > 0 and position < end:
            index = self._piece_at(position)
            piece, offset = self._pieces[index], position - self._starts[index]
            if isinstance(piece, bytes):
                part = piece[offset : offset + num_bytes]
            else:
                part = self._ranges.at(piece[0] + offset, min(num_bytes, piece[1] - offset))
            if not part:
                break
            parts.append(part)
            position += len(part)
            num_bytes -= len(part)
        self._position = position
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        """Reads bytes into a buffer, fewer at the end of the pieces."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position. One before the start, which damaged headers ask for, is the start."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Returns the position."""
        return self._position

    def _piece_at(self, position: int) -> int:
        """Returns the index of the piece that holds a position before the end; near the last one, without a search."""
        index, starts = self._index, self._starts
        if not starts[index] <= position < starts[index + 1]:
            index = self._index = bisect_right(starts, position) - 1
        return index
