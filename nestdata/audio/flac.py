"""Decoding of whole FLAC files with dr_flac, which takes about two thirds of libsndfile's time.

dr_flac belongs to the package miniaudio, which is not installed on every platform. It skips damaged frames without an
error, and accepts damaged metadata. A file is therefore decoded here only if its metadata is plain and all samples that
it promises are found: since dr_flac compares the checksum of every frame, a damaged frame leaves too few samples.
Everything else is left to libsndfile, which decides whether the file can be used.
"""

import re
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.byte_ranges import ByteRanges
from nestdata.audio.file_kind import special_file_kind

# Bits per sample that libsndfile reads, too.
_BITS = frozenset({8, 16, 24})
_PADDING, _SEEK_TABLE, _COMMENTS = 1, 3, 4
_SEEK_POINT_BYTES = 18
# Files with more comments are left to libsndfile.
_MAX_COMMENTS = 1000
# Start of every frame: a sync code, with blocks of fixed or variable size.
_SYNC_CODES = (b"\xff\xf8", b"\xff\xf9")
# Start of a FLAC file: its magic, and the head of STREAMINFO.
_FILE_START = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")
# Bytes before the end of a file in which its last frame is looked for, if STREAMINFO does not give the longest frame.
_TAIL_BYTES = 1 << 14
_MAX_FRAME_HEADER = 16


class FlacHeader(NamedTuple):
    """The properties that the header of a FLAC file gives."""

    rate: int
    num_channels: int
    bits: int
    """Bits per sample."""

    num_samples: int
    """Number of samples of each channel."""


class FlacFile(NamedTuple):
    """A FLAC file in memory."""

    content: bytes
    header: FlacHeader

    def decode(self, out: NDArray[np.float32]) -> bool:
        """Decodes all samples into `out`.

        Args:
            out: Contiguous array that receives the samples, shape (num_samples,) or (num_samples, num_channels).

        Returns:
            Whether exactly these samples were found. If not, the content of `out` is undefined.
        """
        ffi, library = _dr_flac()
        decoder = library.ma_dr_flac_open_memory(self.content, len(self.content), ffi.NULL)
        if not decoder:
            return False
        try:
            read, samples = library.ma_dr_flac_read_pcm_frames_f32, ffi.from_buffer("float[]", out)
            # A further sample would mean that the header gives too few, so that a missing frame would not be noticed.
            return bool(
                read(decoder, self.header.num_samples, samples) == self.header.num_samples
                and read(decoder, 1, ffi.NULL) == 0
            )
        finally:
            library.ma_dr_flac_close(decoder)


def read_flac(path: str) -> FlacFile | None:
    """Reads a FLAC file into memory without decoding it.

    Returns:
        None if libsndfile has to decode the file: dr_flac is not installed, the file does not exist or is not FLAC by
        name and content, or its metadata is damaged or unusual, for instance without the number of samples.
    """
    if not path.lower().endswith(".flac") or _dr_flac() is None or special_file_kind(path):
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.readall()
    except (OSError, ValueError):
        return None
    return parse_flac(content)


def parse_flac(content: bytes) -> FlacFile | None:
    """Parses the metadata of a FLAC file in memory.

    Returns:
        None if libsndfile has to decode the file, as for `read_flac`.
    """
    header = None if _dr_flac() is None else parse_header(content)
    return None if header is None else FlacFile(content, header)


def parse_header(content: bytes) -> FlacHeader | None:
    """Parses the metadata of a FLAC file, as in RFC 9639, section 8.

    Args:
        content: The file, or its start up to the first frame or further.

    Returns:
        None if libsndfile has to read the header: it is not FLAC, the metadata is damaged, unusual, or longer than
        `content`, or it does not give the number of samples.
    """
    # STREAMINFO of 34 bytes comes first.
    if len(content) < 42 or content[:4] != b"fLaC" or content[4] & 0x7F or content[5:8] != b"\x00\x00\x22":
        return None
    if not _end_of_metadata(content):
        return None
    header = stream_info(content)
    return header if header.rate and header.num_samples and header.bits in _BITS else None


def is_too_large(content: bytes, header: FlacHeader, size: int) -> bool:
    """Returns whether a file has more bytes than its frames can take, as joined files of equal length have.

    Args:
        content: The start of the file, whose STREAMINFO gives the shortest block and the longest frame.
        header: The content of STREAMINFO.
        size: Number of bytes of the file.
    """
    longest = int.from_bytes(content[15:18], "big")
    if not longest:  # not known: the size of a frame without compression
        longest = block_size(content) * header.num_channels * header.bits // 8 + _MAX_FRAME_HEADER
    num_frames = header.num_samples // max(1, int.from_bytes(content[8:10], "big")) + 1
    return size - _end_of_metadata(content) > num_frames * longest


def starts_of_files(ranges: ByteRanges, start: int) -> list[int]:
    """Returns the positions of joined FLAC files, the first of which is at `start`; reads all bytes from there."""
    return [start, *ranges.find_all(_FILE_START, start + 1)]


def stream_info(content: bytes) -> FlacHeader:
    """Returns what STREAMINFO says, given the start of a file; 0 samples if their number is not known."""
    # 20 bits of sampling rate, 3 of channels less one, 5 of bits per sample less one, 36 of the number of samples.
    packed = int.from_bytes(content[18:26], "big")
    return FlacHeader(packed >> 44, (packed >> 41 & 0x7) + 1, (packed >> 36 & 0x1F) + 1, packed & 0xFFFFFFFFF)


def block_size(content: bytes) -> int:
    """Returns the number of samples of the longest frame of a file, given its start."""
    return int.from_bytes(content[10:12], "big")


def last_sample(content: bytes, ranges: ByteRanges) -> int | None:
    """Returns the number of the sample behind the last frame of a file, which may be cut off.

    If that number is larger than the number of samples in the header, the file may be several joined files; if it is
    smaller, the file is cut off.

    Args:
        content: The start of the file, for which `parse_header` has found a header.
        ranges: The file.

    Returns:
        None if no frame is found, because other bytes are behind the last one.
    """
    num_samples = stream_info(content).num_samples
    tail_bytes = (int.from_bytes(content[15:18], "big") or _TAIL_BYTES) + _MAX_FRAME_HEADER
    tail = ranges.at(max(0, ranges.size - tail_bytes), tail_bytes)
    # Files with blocks of different sizes have the other sync code.
    code, at = _SYNC_CODES[content[8:10] != content[10:12]], len(tail)
    while (at := tail.rfind(code, 0, at)) >= 0:
        head = tail[at : at + _MAX_FRAME_HEADER]
        found = _frame(head, block_size(content))
        if found is None:
            continue
        end, checksum_at = found
        # The checksum is not needed: 36 bits hardly match by chance.
        if end == num_samples or _crc8(head[:checksum_at]) == head[checksum_at]:
            return end
    return None


def _frame(head: bytes, samples_of_block: int) -> tuple[int, int] | None:
    """Returns the number of the sample behind a frame, and where its checksum is.

    Layout: RFC 9639, section 9.1.

    Args:
        head: The first bytes of the frame, perhaps fewer than its header has.
        samples_of_block: Samples of all frames but the last, if their number is fixed.

    Returns:
        None if it is not a frame. The checksum of its header is not compared.
    """
    if len(head) < 6 or head[3] & 1:
        return None
    size_code, rate_code, channels = head[2] >> 4, head[2] & 15, head[3] >> 4
    if not size_code or rate_code == 15 or channels > 10:
        return None
    # The number of the frame, or of its first sample, encoded like a character in UTF-8.
    num_more = 7 - (head[4] ^ 0xFF).bit_length() if head[4] >= 0xC0 else 0
    if 0x80 <= head[4] < 0xC0 or head[4] == 0xFF or len(head) < 6 + num_more:
        return None
    number = head[4] & (0x7F >> num_more + 1 if num_more else 0x7F)
    for byte in head[5 : 5 + num_more]:
        if byte >> 6 != 2:
            return None
        number = number << 6 | byte & 0x3F
    end = 5 + num_more
    if size_code in (6, 7):
        length = size_code - 5
        num_samples = int.from_bytes(head[end : end + length], "big") + 1
        end += length
    else:
        num_samples = 192 if size_code == 1 else 144 << size_code if size_code < 6 else 1 << size_code
    end += {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if end >= len(head):
        return None
    first = number if head[1] & 1 else number * samples_of_block
    return first + num_samples, end


def _crc8(content: bytes) -> int:
    found = 0
    for byte in content:
        found = _CRC8[found ^ byte]
    return found


def _crc8_of(byte: int) -> int:
    for _ in range(8):
        byte = byte << 1 ^ (0x107 if byte & 0x80 else 0)
    return byte


_CRC8 = tuple(_crc8_of(byte) for byte in range(256))


def _end_of_metadata(content: bytes) -> int:
    """Returns where the first frame begins; 0 unless the blocks before it are intact and of the usual kinds."""
    end, is_last = 42, content[4] >> 7
    while not is_last:
        head = content[end : end + 4]
        if len(head) < 4:
            return 0
        is_last, kind = head[0] >> 7, head[0] & 0x7F
        start, length = end + 4, int.from_bytes(head[1:], "big")
        end = start + length
        if kind == _COMMENTS:
            if not _has_plain_comments(content[start:end]):
                return 0
        elif kind != _PADDING and (kind != _SEEK_TABLE or length % _SEEK_POINT_BYTES):
            return 0
    return end if content[end : end + 2] in _SYNC_CODES else 0


def _has_plain_comments(block: bytes) -> bool:
    """Returns whether the vendor string and the comments, each after its length, fill their block exactly."""
    end = 4 + int.from_bytes(block[:4], "little")
    num_comments = int.from_bytes(block[end : end + 4], "little")
    end += 4
    if num_comments > _MAX_COMMENTS:
        return False
    for _ in range(num_comments):
        end += 4 + int.from_bytes(block[end : end + 4], "little")
    return end == len(block)


@cache
def _dr_flac() -> Any:
    """Returns cffi's access to miniaudio's library, as a pair (ffi, library), or None if it cannot be used."""
    try:
        from miniaudio import ffi, lib
    except (ImportError, OSError):
        return None
    names = ("open_memory", "read_pcm_frames_f32", "close")
    return (ffi, lib) if all(hasattr(lib, f"ma_dr_flac_{name}") for name in names) else None
