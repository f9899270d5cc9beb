"""Random access to the bytes of audio in a file, in memory or in a store, and streams that join pieces of them.

libsndfile reads a `SplicedStream` as if it were a file. So one stream of a joined file can be decoded by itself, and
MPEG frames can be decoded without the bytes between them. The file is not copied.
"""

import io
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nestdata.errors import StorageError

# What libsndfile's decoder of MPEG looks for at the end of a file: an ID3v1 tag.
_TAIL_BYTES = 128
# Bytes that are searched at a time, and the longest pattern.
_BLOCK_BYTES, _MAX_PATTERN_BYTES = 1 << 16, 32


class ByteRanges:
    """Bytes of known number, read at any position.

    No exception can pass through libsndfile. So after an error, reads return no bytes, and `check` raises the error.
    """

    content: bytes | None = None
    """The bytes, if they are in memory."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        """Takes a function that returns up to a number of bytes, given a position and that number."""
        self.size = size
        self._read = read
        self._error: OSError | StorageError | None = None

    @classmethod
    def of_file(cls, descriptor: int, size: int) -> "ByteRanges":
        """Returns the bytes of an open file, whose own position does not move."""
        return cls(size, lambda start, length: os.pread(descriptor, length, start))

    @classmethod
    def of_bytes(cls, content: bytes) -> "ByteRanges":
        """Returns bytes in memory."""
        ranges = cls(len(content), lambda start, length: content[start : start + length])
        ranges.content = content
        return ranges

    def at(self, start: int, length: int) -> bytes:
        """Returns the bytes of a range, fewer if the end comes first, and none after an error."""
        found = b""
        try:
            # A start that a header gives may be larger than any file.
            while not self._error and len(found) < length and start < self.size:
                more = self._read(start + len(found), length - len(found))
                if len(more) == length:
                    return more
                if not more:
                    break
                found += more
        except (OSError, StorageError) as error:
            self._error = error
        return found

    def find_all(self, pattern: re.Pattern[bytes], start: int = 0) -> Iterator[int]:
        """Yields where matches of a pattern, each of up to 32 bytes, begin, from a position."""
        while len(block := self.at(start, _BLOCK_BYTES + _MAX_PATTERN_BYTES)):
            for match in pattern.finditer(block):
                if match.start() < _BLOCK_BYTES:
                    yield start + match.start()
            start += _BLOCK_BYTES

    def part(self, start: int, length: int) -> "ByteRanges":
        """Returns a range as an object of its own; if a read of it fails, `check` of the whole raises the error."""
        if self.content is not None:
            return ByteRanges.of_bytes(self.content[start : start + length])
        length = max(0, min(length, self.size - start))
        return ByteRanges(length, lambda begin, wanted: self.at(start + begin, min(wanted, length - begin)))

    def check(self) -> None:
        """Raises the first error of a read."""
        if self._error:
            raise self._error


Piece = tuple[int, int] | bytes
"""First byte and length of a range, or the bytes themselves."""


class SplicedStream:
    """A seekable stream of pieces one after the other, for libsndfile.

    The stream may claim to be longer than its pieces: libsndfile's decoder of MPEG estimates the number of samples from
    the size, and gives no more than it has estimated. A read behind the pieces is at the end of the stream.
    """

    def __init__(self, ranges: ByteRanges, pieces: Sequence[Piece] | None = None, claimed_size: int = 0) -> None:
        """Takes the pieces, by default all bytes."""
        self._ranges = ranges
        self._pieces = [(0, ranges.size)] if pieces is None else pieces
        self._starts = [0]
        for piece in self._pieces:
            length = len(piece) if isinstance(piece, bytes) else piece[1]
            self._starts.append(self._starts[-1] + length)
        self._size = max(self._starts[-1], claimed_size)
        self._position = 0

    def read(self, num_bytes: int) -> bytes:
        """Reads bytes, fewer at the end of the pieces."""
        position, end = self._position, self._starts[-1]
        if position >= end:
            # When libsndfile opens a file, it looks for tags in the claimed tail, and finds zeros.
            has_tail = self._size - _TAIL_BYTES <= position < self._size
            found = bytes(min(num_bytes, self._size - position)) if has_tail else b""
            self._position += len(found)
            return found
        parts = []
        index = bisect_right(self._starts, position) - 1
        while num_bytes > 0 and position < end:
            while position >= self._starts[index + 1]:
                index += 1
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
        """Sets the position. A position before the start, to which a damaged header may lead, becomes the start."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Returns the position."""
        return self._position
