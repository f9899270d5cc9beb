"""A tar that is open for one pass: its members, and their bytes for probing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from zlib import crc32

from nestdata.errors import ManifestError, StorageError
from nestdata.prepare.inputs.audio import MAX_BYTES, Member, Unusable
from nestdata.prepare.inputs.content import HEAD_BYTES, LoadedContent, StoredContent
from nestdata.prepare.inputs.tar import ReadAt, TarError, TarMember, walk
from nestdata.storage import ObjectInfo, is_url, storage

MAX_HELD = 256 << 20
"""Length in bytes of the longest member of a remote tar that is held in memory. Of a longer one, the samples are only
needed to decode it, for which it is read again."""

# Bits of the number of an entry for its position in the manifest of its shard, or in its tar.
_POSITION_BITS = 32
# Bytes of a local tar that are read at a time: the headers of a member, and the start of its content.
_READ_AHEAD = HEAD_BYTES + 2048
# Bytes of a stream that are read at a time: many members, which are then copied once.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A local tar, of which only what is asked for is read, or a remote one, which is read once from start to end."""

    info: ObjectInfo
    read_at: ReadAt

    def members(self) -> Iterator[TarMember]:
        """Yields the members of all archives in the order in which they are stored; errors are those of `walk`."""
        return walk(self.read_at, self.info.size)

    def read(self, found: TarMember) -> bytes:
        """Returns the bytes of the member that was yielded last."""
        return self.read_at(found.offset, found.size)

    def member(self, found: TarMember) -> Member:
        """Returns the address of the member that was yielded last.

        A member of a stream comes with its bytes, or if it is long with its header and its checksum.
        """
        crc, start = None, b""
        if isinstance(self.read_at, ForwardReader):
            if found.size <= MAX_HELD:
                return Member(self.info, found.offset, found.size, LoadedContent(self.read(found)))
            if found.size <= MAX_BYTES:
                start = self.read_at(found.offset, HEAD_BYTES)
                crc = self.read_at.checksum(found.offset, found.size)
        else:
            start = self.read_at(found.offset, min(found.size, HEAD_BYTES))
        content = StoredContent(self.info.location, found.offset, found.size, self.info.etag, start=start)
        return Member(self.info, found.offset, found.size, content, crc)


@runtime_checkable
class Readable(Protocol):
    """A stream of bytes."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fills a buffer from its start, and returns the number of bytes: 0 only at the end of the stream."""


class ForwardReader:
    """A `ReadAt` for a stream: holds some of it from the last offset on, and can only go forward."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._buffer = memoryview(bytearray(_CHUNK))
        self._start = 0  # of the bytes in the buffer
        self._end = 0
        self._offset = 0  # of the last call

    def __call__(self, offset: int, length: int) -> bytes:
        """Returns up to `length` bytes at an offset, which must not be lower than that of an earlier call."""
        assert offset >= self._offset, "a stream is read forward"
        self._offset = offset
        if offset + length > self._end:
            self._read(offset, length)
        begin = offset - self._start
        return bytes(self._buffer[begin : min(begin + length, self._end - self._start)])

    def checksum(self, offset: int, length: int) -> int:
        """Returns the crc32 of bytes without holding all of them; they cannot be read again."""
        found = 0
        for begin in range(offset, offset + length, _CHUNK):
            found = crc32(self(begin, min(_CHUNK, offset + length - begin)), found)
        return found

    def _read(self, offset: int, length: int) -> None:
        """Reads on, until the buffer begins at `offset` and holds `length` bytes, or the stream ends."""
        kept = bytes(self._buffer[offset - self._start : self._end - self._start]) if offset < self._end else b""
        while self._end < offset and (count := self._stream.readinto(self._buffer[: offset - self._end])):
            self._end += count
        if len(self._buffer) != max(length, _CHUNK):
            self._buffer = memoryview(bytearray(max(length, _CHUNK)))
        self._buffer[: len(kept)] = kept
        held = len(kept)
        while held < length and (count := self._stream.readinto(self._buffer[held:])):
            held += count
        self._start, self._end = offset, offset + held


class _BufferedFile:
    """A `ReadAt` for a local file: keeps the bytes that were read last."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start = 0
        self._kept = b""

    def __call__(self, offset: int, length: int) -> bytes:
        """Returns up to `length` bytes at any offset."""
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._kept):
            self._start, self._kept = offset, os.pread(self._descriptor, max(length, _READ_AHEAD), offset)
            begin = 0
        return self._kept[begin : begin + length]


@contextmanager
def open_shard(location: str) -> Iterator[OpenShard]:
    """Opens a tar by its absolute path or URL.

    Raises:
        ManifestError: It does not exist.
        StorageError: It cannot be read for another reason.
    """
    try:
        info = storage().info(location)
    except StorageError as error:
        if error.kind != "missing":
            raise
        raise ManifestError(
            f"{location}: no such shard. Restore it, or leave it out of the pattern and the manifest."
        ) from error
    if is_url(location):
        with storage().open_stream(location, info=info) as stream:
            yield OpenShard(info, ForwardReader(stream))
        return
    file = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield OpenShard(info, _BufferedFile(file))
    finally:
        os.close(file)


def damage(error: TarError, location: str) -> Unusable:
    """Returns why the members behind the damage of a tar cannot be used."""
    return Unusable(error.reason, f"{location}: {error}")


def unsafe(found: TarMember, location: str) -> Unusable:
    """Returns why a member with a `problem` is not used."""
    return Unusable("unsafe_member", f"{location}: the member {found.name!r} is {_article(found.problem)}")


def entry_number(shard: int, position: int) -> int:
    """Returns one number for the index of a shard, counted from 0, and a position in it."""
    return shard << _POSITION_BITS | position


def shard_and_position(number: int) -> tuple[int, int]:
    """Returns the arguments of `entry_number`."""
    return number >> _POSITION_BITS, number & ((1 << _POSITION_BITS) - 1)


def _article(problem: str) -> str:
    return f"stored under {problem}" if "name" in problem.split() else problem
