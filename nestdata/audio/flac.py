"""Decoding of whole FLAC files with dr_flac, which takes about two thirds of libsndfile's time.

dr_flac belongs to the package miniaudio, which is not installed on every platform. It skips damaged frames without an
error, and accepts damaged metadata. A file is therefore decoded here only if its metadata is plain and all samples that
it promises are found: since dr_flac compares the checksum of every frame, a damaged frame leaves too few samples.
Everything else is left to libsndfile, which decides whether the file can be used.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.file_kind import special_file_kind

# Bits per sample that libsndfile reads, too.
_BITS = frozenset({8, 16, 24})
_PADDING, _SEEK_TABLE, _COMMENTS = 1, 3, 4
_SEEK_POINT_BYTES = 18
# Files with more comments are left to libsndfile.
_MAX_COMMENTS = 1000
# Start of every frame: a sync code, with blocks of fixed or variable size.
_SYNC_CODES = (b"\xff\xf8", b"\xff\xf9")


class FlacHeader(NamedTuple):
    """The properties that the header of a FLAC file gives."""

    rate: int
    num_channels: int
    bits: int
    """Bits per sample."""

    num_samples: int
    """Number of samples of each channel, at least 1."""


class FlacFile(NamedTuple):
    """A FLAC file in memory, with the properties that its header gives."""

    content: bytes
    rate: int
    num_channels: int
    bits: int
    """Bits per sample."""

    num_samples: int
    """Number of samples of each channel, at least 1."""

    def decode(self, out: NDArray[np.float32] | NDArray[np.int16]) -> bool:
        """Decodes all samples into `out`.

        Args:
            out: Contiguous array that receives the samples, shape (num_samples,) or (num_samples, num_channels). For
                16-bit integers, the file must have at most 16 bits per sample.

        Returns:
            Whether exactly these samples were found. If not, the content of `out` is undefined.
        """
        ffi, library = _dr_flac()
        decoder = library.ma_dr_flac_open_memory(self.content, len(self.content), ffi.NULL)
        if not decoder:
            return False
        try:
            if out.dtype == np.int16:
                read, samples = library.ma_dr_flac_read_pcm_frames_s16, ffi.from_buffer("ma_dr_flac_int16[]", out)
            else:
                read, samples = library.ma_dr_flac_read_pcm_frames_f32, ffi.from_buffer("float[]", out)
            # A further sample would mean that the header gives too few, so that a missing frame would not be noticed.
            return bool(
                read(decoder, self.num_samples, samples) == self.num_samples and read(decoder, 1, ffi.NULL) == 0
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
    return None if header is None else FlacFile(content, *header)


def parse_header(content: bytes) -> FlacHeader | None:
    """Parses the metadata of a FLAC file; the layout is that of RFC 9639, section 8.

    Args:
        content: The file, or its start up to the first frame or further.

    Returns:
        None if libsndfile has to read the header: it is not FLAC, the metadata is damaged, unusual, or longer than
        `content`, or it does not give the number of samples.
    """
    # STREAMINFO of 34 bytes comes first.
    if len(content) < 42 or content[:4] != b"fLaC" or content[4] & 0x7F or content[5:8] != b"\x00\x00\x22":
        return None
    if not _has_plain_metadata(content):
        return None
    # 20 bits of sampling rate, 3 of channels less one, 5 of bits per sample less one, 36 of the number of samples.
    packed = int.from_bytes(content[18:26], "big")
    rate, num_channels, bits = packed >> 44, (packed >> 41 & 0x7) + 1, (packed >> 36 & 0x1F) + 1
    num_samples = packed & 0xFFFFFFFFF
    if not rate or not num_samples or bits not in _BITS:
        return None
    return FlacHeader(rate, num_channels, bits, num_samples)


def _has_plain_metadata(content: bytes) -> bool:
    """Returns whether the blocks after STREAMINFO are intact and of the usual kinds, and a frame follows them."""
    end, is_last = 42, content[4] >> 7
    while not is_last:
        head = content[end : end + 4]
        if len(head) < 4:
            return False
        is_last, kind = head[0] >> 7, head[0] & 0x7F
        start, length = end + 4, int.from_bytes(head[1:], "big")
        end = start + length
        if kind == _COMMENTS:
            if not _has_plain_comments(content[start:end]):
                return False
        elif kind != _PADDING and (kind != _SEEK_TABLE or length % _SEEK_POINT_BYTES):
            return False
    return content[end : end + 2] in _SYNC_CODES


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
    names = ("open_memory", "read_pcm_frames_s16", "read_pcm_frames_f32", "close")
    return (ffi, lib) if all(hasattr(lib, f"ma_dr_flac_{name}") for name in names) else None
