"""Tars that are read in place: the addresses of their members, by the headers that `tarfile` reads.

`tarfile` alone takes damage behind the first member for the end of the archive, and stops at an end mark. `walk`
distinguishes damage from the end, and goes on behind an end mark, because archives can be joined with `cat`.
"""

import tarfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader, FileIO
from typing import Any, ClassVar, Literal, NamedTuple

from nestdata.audio.byte_ranges import SplicedStream
from nestdata.errors import ManifestError, StorageError, in_one_line
from nestdata.prepare.inputs.entry import HEAD_BYTES, Member, Unusable
from nestdata.storage import ObjectInfo, is_url, storage

MAX_HELD = 256 << 20
"""Length in bytes of the longest member of a remote tar that is held in memory. A longer one is read again."""

_BLOCK = tarfile.BLOCKSIZE
# Records of extended headers and long names are a few hundred bytes; more than this is damage.
_MAX_EXTENSION = 1 << 20
# Zeros behind an end mark: GNU tar fills records of 10 KiB by default, and records of some megabytes for a tape drive.
# More than this is not read, so that the hole of a sparse file takes no time.
_MAX_PADDING = 1 << 26
_PADDING_READ = 1 << 16
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a pipe",
}
_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x1f\x9d": "compress",
}
# Bits of the number of an entry for its position in the manifest of its shard, or in its tar.
_POSITION_BITS = 32
# Bytes of a local tar that are read at a time: the headers of a member, and the start of its content.
_READ_AHEAD = HEAD_BYTES + 4 * _BLOCK


Stream = BufferedIOBase | SplicedStream
"""An open tar."""


class TarError(Exception):
    """An archive cannot be read from some position on; the members before it are intact."""

    def __init__(
        self, message: str, reason: Literal["compressed_tar", "shard_unreadable"] = "shard_unreadable"
    ) -> None:
        super().__init__(message)
        self.reason = reason


class TarMember(NamedTuple):
    """A file in an archive."""

    name: str
    offset: int
    """First byte of the content."""

    size: int
    """Length of the content in bytes."""

    problem: str = ""
    """Why the member must not be used, such as `a symbolic link`; empty for a regular file with a relative name."""


def walk(file: Stream, size: int) -> Iterator[TarMember]:
    """Yields the members of all archives of a file in the order in which they are stored; skips folders.

    Between two members, the caller may seek and read in the file.

    Args:
        file: The file, which is only read forward, apart from single bytes.
        size: Its length in bytes.

    Raises:
        TarError: The file is compressed, is not a tar, or is damaged or truncated, or holds something else behind the
            end mark of an archive. The members before the damage were yielded; a member that is cut off was not.
    """
    start: int | None = 0
    while start is not None:
        end = yield from _walk_archive(file, size, start)
        start = _after_padding(file, size, end)


def _walk_archive(file: Stream, size: int, start: int) -> Generator[TarMember, None, int]:
    """Yields the members of the archive that begins at `start`, and returns where its end mark begins."""
    file.seek(start)
    end = start
    try:
        with tarfile.TarFile(fileobj=_Headers(file), encoding="utf-8") as tar:  # type: ignore[arg-type]
            while info := tar.next():
                if not (end < tar.offset and info.size >= 0):
                    raise TarError(f"the header at byte {end} is damaged")
                if info.isreg() and not info.sparse and info.offset_data + info.size > size:
                    raise TarError(f"ends at byte {size}, inside {info.name!r}, which begins at byte {info.offset}")
                end = tar.offset
                if not info.isdir():
                    yield TarMember(info.name, info.offset_data, info.size, _problem(info))
                tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
    except (TarError, StorageError, OSError):
        raise
    except Exception as error:  # hostile headers make `tarfile` raise errors of many kinds
        raise _damage(file, start, end, in_one_line(error)) from None
    file.seek(end)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise _damage(file, start, end)
    return end


def _after_padding(file: Stream, size: int, end: int) -> int | None:
    """Returns the first block behind an end mark that is not zero; None if the file ends before.

    Raises:
        TarError: There are too many zeros.
    """
    file.seek(end)
    for offset in range(end, min(size, end + _MAX_PADDING), _PADDING_READ):
        data = file.read(_PADDING_READ)
        if found := data.lstrip(b"\0"):
            return offset + (len(data) - len(found)) // _BLOCK * _BLOCK
    if size > end + _MAX_PADDING:
        raise TarError(f"has more than {_MAX_PADDING >> 20} MiB of zeros behind byte {end}; what follows was not read")
    return None


class _Headers:
    """The file as `tarfile` reads it: only headers and their extensions, which are short."""

    def __init__(self, file: Stream) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, num_bytes: int) -> bytes:
        if not 0 <= num_bytes <= _MAX_EXTENSION:
            raise TarError(f"the extended header before byte {self.tell()} has {num_bytes} bytes")
        return self._file.read(num_bytes)


def _problem(info: tarfile.TarInfo) -> str:
    """Returns why a member must not be used; empty if it may be used."""
    if info.name.startswith("/"):
        return "stored under an absolute name"
    if ".." in info.name.split("/"):
        return "stored under a name with `..`"
    if info.type in _KINDS:
        return _KINDS[info.type] + (f" to {info.linkname!r}" if info.islnk() or info.issym() else "")
    if info.sparse is not None or any(key.startswith("GNU.sparse.") for key in info.pax_headers):
        return "a sparse file"
    if not info.isreg():
        return f"of the unknown type {info.type.decode('latin-1')!r}"
    return "" if info.name else "stored without a name"


def _damage(file: Stream, start: int, end: int, problem: str = "it is damaged") -> TarError:
    """Returns why no member was found at byte `end` of the archive that begins at `start`."""
    file.seek(end)
    block = file.read(_BLOCK)
    if end == 0:
        for magic, name in _COMPRESSIONS.items():
            if block.startswith(magic):
                message = f"compressed with {name}, so that its members have no addresses. Decompress it first"
                return TarError(message, "compressed_tar")
        return TarError("not a tar archive" if block else "has no bytes")
    if end == start:
        return TarError(f"has an end mark, and behind it, at byte {end}, something that is not a tar")
    if len(block) < _BLOCK:
        return TarError(f"ends behind byte {end} without the end mark of a tar: it may be truncated")
    return TarError(f"no header at byte {end}: {problem}")


def stem_and_suffix(name: str) -> tuple[str, str]:
    """Splits the name of a member before its last dot, and lowers the suffix: `a/b.c.FLAC` is `a/b.c` and `.flac`."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.rpartition(".")
    return (folder + slash + stem, dot + suffix.lower()) if stem else (name, "")


def plain_name(name: str) -> str:
    """Returns the name of a member without the leading `./` that `tar cf x.tar .` writes."""
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return name


@dataclass(slots=True)
class OpenShard:
    """A tar that is open for one pass: a local file, in which only the start of members is read, or a stream."""

    info: ObjectInfo
    file: Stream
    problem: Unusable | None = None
    """Why not all members were found, once `members` has ended."""

    def members(self) -> Iterator[TarMember]:
        """Yields the members of all archives in the order in which they are stored, up to damage."""
        try:
            yield from walk(self.file, self.info.size)
        except TarError as error:
            self.problem = Unusable(error.reason, f"{self.info.location}: {error}")

    def member(self, found: TarMember) -> Member | Unusable:
        """Returns the address of the member that was yielded last, or why it must not be used.

        If the tar is a stream, a member that is not too long comes with all its bytes; any other with its start.
        """
        is_held = is_url(self.info.location) and found.size <= MAX_HELD
        self.file.seek(found.offset)
        start = b"" if found.problem else self.file.read(found.size if is_held else min(found.size, HEAD_BYTES))
        return self.address(found, start)

    def address(self, found: TarMember, start: bytes = b"") -> Member | Unusable:
        """Returns the address of a member whose bytes are read when they are needed, apart from its start."""
        if found.problem:
            return Unusable("unsafe_member", f"{self.info.location}: the member {found.name!r} is {found.problem}")
        return Member(self.info, found.offset, found.size, start=start)


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
    is_remote = is_url(location)
    stream = storage().open_stream(location, info=info) if is_remote else BufferedReader(FileIO(location), _READ_AHEAD)
    with stream as file:
        yield OpenShard(info, file)


def member_at(location: str, start: int, info: ObjectInfo, name: str | None = None) -> Member | Unusable:
    """Returns the member whose header is at a byte of a tar, or why it must not be used; raises StorageError.

    Args:
        location: Absolute path or URL of the tar.
        start: The byte.
        info: Size and ETag of the tar.
        name: The name that the member must have; None for any name.
    """
    size = info.size - start
    ranges = Member(info, start, size).ranges()
    shard = OpenShard(info, SplicedStream(ranges))
    try:
        found = next(walk(shard.file, size), None)
        ranges.check()
    except TarError as error:
        ranges.check()
        return Unusable(error.reason, f"{location}: {error}")
    if found is None:
        return Unusable("no_such_member", f"{location}: the tar ends at byte {start}")
    if name not in (None, found.name):
        return Unusable("no_such_member", f"{location}: the member at byte {start} is {found.name!r}, not {name!r}")
    return shard.address(found._replace(offset=start + found.offset))


class ShardSource:
    """The methods of `Source` for an input of shards. Items are the index of a shard, and its files."""

    items_per_task: ClassVar[int] = 1
    shards: tuple[tuple[str, ...], ...]
    """Absolute paths or URLs of the files of each shard; the first has the lines that are counted, if there are two."""

    def items(self) -> Iterator[Any]:
        """Yields the shards with their indices."""
        yield from enumerate(self.shards)

    def files(self, item: Any) -> list[str]:
        """Returns the files of a shard."""
        return [*item[1]]

    def where(self, number: int) -> str:
        """Returns the first file of a shard and the number of the line or sample, counted from 1."""
        index, position = divmod(number, 1 << _POSITION_BITS)
        return f"{self.shards[index][0]}:{position}"

    def count(self) -> int | None:
        """Returns the number of shards."""
        return len(self.shards)


def entry_number(shard: int, position: int) -> int:
    """Returns one number for the index of a shard, counted from 0, and a position in it."""
    return shard << _POSITION_BITS | position
