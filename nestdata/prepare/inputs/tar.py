"""Reads the headers of tar archives, without unpacking anything.

`walk` yields the name, offset and size of every file in an archive, or in archives one after the other, as `cat` joins
them. It reads them through a function that returns bytes at an offset, and calls it with ascending offsets only, so
that it serves files and streams alike. Compared with `tarfile`, it takes a fraction of the time for each member, and
tells damage from the end of an archive.

Source: POSIX.1-2008, pax interchange format; GNU tar manual, "Basic Tar Format" and "Extensions to the tar format".
"""

import re
from collections.abc import Callable, Generator, Iterator
from typing import Literal, NamedTuple
from zlib import adler32

BLOCK = 512
# Bytes that are read at a time: enough for a pax header, its records and the header that it describes.
_READ = 4 * BLOCK
# Records of extended headers and long names are a few hundred bytes; more than this is damage.
_MAX_EXTENSION = 1 << 20
_ZEROS = bytes(BLOCK)
# Zeros behind an end mark: GNU tar fills records of 10 KiB by default, and a tape drive those of some megabytes. More
# than this is not read, so that the hole of a sparse file takes no time.
_MAX_PADDING = 1 << 26
_PADDING_READ = 1 << 16
_REGULAR = frozenset({0, ord("0"), ord("7")})
_LINKS = {ord("1"): "a hard link", ord("2"): "a symbolic link"}
_DEVICES = {ord("3"): "a character device", ord("4"): "a block device", ord("6"): "a pipe"}
_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x1f\x9d": "compress",
}
_ADLER_MODULUS = 65521
# Digits of the size in a pax record: 2^64 has 20.
_MAX_DIGITS = 20
_PAX_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")

ReadAt = Callable[[int, int], bytes]
"""Returns up to `length` bytes at `offset`, fewer only at the end: `read_at(offset, length)`."""

TarProblem = Literal["compressed_tar", "shard_unreadable"]


class TarError(Exception):
    """An archive cannot be read from some position on; the members before it are intact."""

    def __init__(self, reason: TarProblem, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TarMember(NamedTuple):
    """A file in an archive."""

    name: str
    offset: int
    """First byte of the content. The last header of the member precedes it directly."""

    size: int
    """Length of the content in bytes."""

    problem: str = ""
    """Why the member must not be used, such as `a symbolic link`; empty for a regular file with a relative name."""


def walk(read_at: ReadAt, size: int) -> Iterator[TarMember]:
    """Yields the members of all archives of a file in the order in which they are stored; skips folders.

    Between two members, the caller may read the content of the last one through `read_at`.

    Args:
        read_at: Returns bytes of the file. It is called with ascending offsets.
        size: Length of the file in bytes.

    Raises:
        TarError: The file is compressed, is not a tar, or is damaged or truncated, or holds something else behind the
            end mark of an archive. The members before the damage were yielded; a member that is cut off was not.
    """
    start: int | None = 0
    while start is not None:
        end = yield from walk_archive(read_at, size, start)
        start = _after_padding(read_at, size, end)


def walk_archive(read_at: ReadAt, size: int, start: int = 0) -> Generator[TarMember, None, int]:
    """Does the work of `walk` for the archive that begins at `start`, and returns where its end mark begins."""
    offset = start
    defaults: dict[str, str] = {}
    own: dict[str, str] = {}
    while True:
        data = read_at(offset, _READ)
        header = data[:BLOCK]
        if header == _ZEROS:
            return offset
        _check_header(header, offset, start)
        kind, payload = header[156], offset + BLOCK
        num_bytes = _number(header[124:136], offset)
        if kind in b"xgXLK":
            if num_bytes > _MAX_EXTENSION:
                raise _unreadable(f"the extended header at byte {offset} has {num_bytes} bytes")
            content = data[BLOCK : BLOCK + num_bytes]
            if len(content) < num_bytes:
                content = read_at(payload, num_bytes)
            if len(content) < num_bytes:
                raise _truncated(size, offset)
            if kind in b"LK":
                own["path" if kind == ord("L") else "linkpath"] = _text(content)
            else:
                (defaults if kind == ord("g") else own).update(_pax_records(content, offset))
            offset = payload + _padded(num_bytes)
            continue
        values, own = ({**defaults, **own} if defaults or own else {}), {}
        name = values.get("path") or _name(header)
        if "size" in values:
            num_bytes = _pax_size(values["size"], offset)
        payload = _after_sparse_map(read_at, header, payload)
        if not _has_content(kind):
            num_bytes = 0
        end = payload + num_bytes
        if end > size:
            raise _truncated(size, offset, name)
        if not _is_folder(kind, name):
            yield TarMember(name, payload, num_bytes, _problem(kind, name, values, header))
        offset = payload + _padded(num_bytes)


def _after_padding(read_at: ReadAt, size: int, end: int) -> int | None:
    """Returns the first block behind an end mark that is not zero; None if the file ends before.

    Raises:
        TarError: There are too many zeros.
    """
    for offset in range(end, min(size, end + _MAX_PADDING), _PADDING_READ):
        data = read_at(offset, _PADDING_READ)
        if found := data.lstrip(b"\0"):
            return offset + (len(data) - len(found)) // BLOCK * BLOCK
        if len(data) < _PADDING_READ:
            return None
    if size <= end + _MAX_PADDING:
        return None
    raise _unreadable(
        f"has more than {_MAX_PADDING >> 20} MiB of zeros behind the end mark at byte {end}; what follows was not read"
    )


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


def _check_header(header: bytes, offset: int, start: int) -> None:
    """Raises TarError if a block of the archive that begins at `start` is not a header; names the likely reason."""
    if len(header) == BLOCK:
        # The lower half of an Adler-32 checksum is one more than the sum of all bytes, modulo 65521 (RFC 1950), and
        # takes a tenth of the time of `sum`.
        total = (adler32(header) & 0xFFFF) - 1 - sum(header[148:156]) + 8 * ord(" ")
        stated = _octal(header[148:156])
        if stated is not None and ((stated - total) % _ADLER_MODULUS == 0 or stated == _signed_sum(header)):
            return
    if offset == 0:
        for magic, name in _COMPRESSIONS.items():
            if header.startswith(magic):
                raise TarError("compressed_tar", f"compressed with {name}: single members cannot be read")
        raise _unreadable("not a tar archive" if header else "has no bytes")
    if offset == start:
        raise _unreadable(f"has an end mark, and behind it, at byte {offset}, something that is not a tar")
    if not header:
        raise _unreadable(f"ends after {offset} bytes without the end mark of a tar: it may be truncated")
    if len(header) < BLOCK:
        raise _unreadable(f"ends at byte {offset + len(header)}, inside a header")
    raise _unreadable(f"the header at byte {offset} is damaged")


def _signed_sum(header: bytes) -> int:
    """Returns the checksum that some old programs wrote: that of signed bytes."""
    total = sum(header) - sum(header[148:156])
    num_high = sum(byte > 127 for byte in header[:148] + header[156:])
    return total - 256 * num_high + 8 * ord(" ")


def _octal(field: bytes) -> int | None:
    """Returns an octal number that ends at a NUL byte; None if it is not one."""
    digits = field.partition(b"\0")[0].strip()
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        return None


def _number(field: bytes, offset: int) -> int:
    """Returns a size: octal digits, or base 256 if the highest bit is set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    value = None if field[0] == 0xFF else _octal(field)
    if value is None or value < 0:
        raise _unreadable(f"the header at byte {offset} has a size of {field!r}")
    return value


def _pax_records(content: bytes, offset: int) -> dict[str, str]:
    """Parses the records of an extended header: `LENGTH KEY=VALUE` and a newline each."""
    records = {}
    position = 0
    while position < len(content) and content[position]:
        match = _PAX_RECORD.match(content, position)
        end = position + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(content) or content[end - 1] != ord("\n"):
            raise _unreadable(f"the extended header at byte {offset} is damaged")
        records[match[2].decode(errors="surrogateescape")] = content[match.end() : end - 1].decode(
            errors="surrogateescape"
        )
        position = end
    return records


def _pax_size(text: str, offset: int) -> int:
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise _unreadable(f"the header at byte {offset} has a size of {text[:80]!r}")
    return int(text)


def _name(header: bytes) -> str:
    name = _text(header[:100])
    # GNU tar keeps times where POSIX has the first part of a long name.
    if header[257:263] == b"ustar\0" and (prefix := _text(header[345:500])):
        return f"{prefix}/{name}"
    return name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def _after_sparse_map(read_at: ReadAt, header: bytes, payload: int) -> int:
    """Returns where the content begins: behind all blocks of the map of an old sparse file."""
    is_extended = header[156] == ord("S") and header[482]
    while is_extended:
        block = read_at(payload, BLOCK)
        payload += BLOCK
        is_extended = len(block) == BLOCK and block[504]
    return payload


def _has_content(kind: int) -> bool:
    """Returns whether the size in the header is that of content; links, devices and folders have none."""
    return kind not in b"123456"


def _is_folder(kind: int, name: str) -> bool:
    return kind == ord("5") or (kind == 0 and name.endswith("/"))


def _problem(kind: int, name: str, values: dict[str, str], header: bytes) -> str:
    """Returns why a member must not be used; empty if it may be used."""
    if name.startswith("/"):
        return "an absolute name"
    if ".." in name.split("/"):
        return "a name with `..`"
    if kind in _LINKS:
        return f"{_LINKS[kind]} to {values.get('linkpath') or _text(header[157:257])!r}"
    if kind in _DEVICES:
        return _DEVICES[kind]
    if kind == ord("S") or any(key.startswith("GNU.sparse.") for key in values):
        return "a sparse file"
    if kind not in _REGULAR:
        return f"of the unknown type {chr(kind)!r}"
    return "" if name else "without a name"


def _unreadable(message: str) -> TarError:
    return TarError("shard_unreadable", message)


def _truncated(size: int, offset: int, name: str = "") -> TarError:
    inside = f"{name!r}, which begins" if name else "the extended header"
    return _unreadable(f"ends at byte {size}, inside {inside} at byte {offset}: it is truncated")
