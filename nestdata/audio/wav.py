"""Plain 16-bit WAV files, on disk or in memory, read without libsndfile.

libsndfile converts samples in small blocks, and reads memory through calls into Python; both take several times as long
as copying all samples at once. Only files whose layout leaves nothing to interpret are read here, to the same samples;
everything else is left to libsndfile, which decides whether it can be used.
"""

import struct
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.byte_ranges import ByteRanges
from nestdata.audio.reader import AudioReader

_PCM = 1
# How files begin, with the byte order of their lengths.
_BYTE_ORDERS: Mapping[tuple[bytes, bytes], Literal["little", "big"]] = {
    (b"RIFF", b"WAVE"): "little", (b"RF64", b"WAVE"): "little", (b"RIFX", b"WAVE"): "big",
    (b"FORM", b"AIFF"): "big", (b"FORM", b"AIFC"): "big",
}  # fmt: skip
_W64 = b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\x00\x00"
_CAF = b"caff\x00\x01\x00\x00"
# Largest number of chunks of CAF that are followed; files have about five.
_MAX_CHUNKS = 1000
# MPEG audio of layers 1 and 2, and of layer 3 (the registry of wave formats in RFC 2361).
_MPEG_TAGS = (0x50, 0x55)
# What programs write as the number of bytes when they write to a pipe and cannot go back to the header:
# FFmpeg (riffenc.c), LAME (lame_main.c), and arecord, now and before it had a limit of 2 GiB (aplay.c).
_STREAMED_BYTES = (0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x7FFFFF00)
# SoX (wav.c, MS_UNSPEC) and eSpeak: this number, rounded down to whole blocks.
_STREAMED_BLOCKS = 0x7FFFF000
# Chunks that libsndfile skips or that say nothing about the samples, with the lowest length that it accepts.
_SKIPPED = {b"fact": 4, b"JUNK": 0, b"bext": 0, b"PAD ": 0}
# libsndfile refuses some files with longer texts.
_MAX_TEXT_BYTES = 1000
# Lengths of `fmt `: without and with the length of an extension, which is empty.
_FORM_BYTES = (16, 18)
# libsndfile refuses files with more channels.
_MAX_CHANNELS = 1024
HEAD_BYTES = 1 << 12
"""Bytes from the start of a file in which all chunks have to begin; most headers have 44 or 78 bytes."""


class PlainWav(AudioReader):
    """A plain WAV file."""

    num_samples: int

    def __init__(self, header: "WavHeader", ranges: ByteRanges) -> None:
        self.rate, self.num_channels, self.num_samples = header.rate, header.num_channels, header.num_samples
        self._begin = header.begin
        self._ranges = ranges
        self._num_left = header.num_samples

    def seek(self, position: int) -> None:
        """Moves to a position in samples, or to the end if that comes first."""
        self._num_left = max(0, self.num_samples - position)

    def read(self, num_samples: int) -> NDArray[np.float32]:
        """Returns the next samples; fewer at the end of the file."""
        out = np.empty((min(num_samples, self._num_left), self.num_channels), np.float32)
        return out[: self.read_into(out)]

    def read_into(self, out: NDArray[np.float32]) -> int:
        """Fills an array, shape (num_samples,) for one channel, or (num_samples, num_channels)."""
        wanted, bytes_per_sample = min(len(out), self._num_left), 2 * self.num_channels
        start, length = self._begin + (self.num_samples - self._num_left) * bytes_per_sample, wanted * bytes_per_sample
        whole = self._ranges.content
        content = self._ranges.at(start, length) if whole is None else memoryview(whole)[start : start + length]
        # Fewer than wanted if the file was cut off after its header was read.
        found = np.frombuffer(content, "<i2", len(content) // bytes_per_sample * self.num_channels)
        found = found.reshape(-1, self.num_channels)
        self._num_left -= len(found)
        target = out[: len(found)].reshape(found.shape)
        np.multiply(found, np.float32(1 / 32768), out=target)
        return len(found)


class WavHeader(NamedTuple):
    """The properties that the header of a plain 16-bit WAV file gives."""

    rate: int
    num_channels: int
    num_samples: int
    """Number of samples of each channel, at least 1."""

    begin: int
    """First byte of the samples in the file."""


def parse_header(content: bytes, size: int) -> WavHeader | None:
    """Parses the chunks of a WAV file, as in "Multimedia Programming Interface" by Microsoft and IBM.

    Args:
        content: The file, or its start. All chunks must begin in it.
        size: Length of the file in bytes.

    Returns:
        None if libsndfile has to read the header, because the file is not WAV, has another encoding than 16-bit
        integers, or is truncated or unusual; or if `content` is too short.
    """
    if content[:4] != b"RIFF" or content[8:16] != b"WAVEfmt ":
        return None
    begin, form, data = 12, b"", (0, 0)
    while len(head := content[begin : begin + 8]) == 8:
        kind, length, begin = head[:4], int.from_bytes(head[4:], "little"), begin + 8
        if kind == b"data" and not data[0]:
            data = begin, length
        elif kind == b"fmt " and not form and not data[0] and length in _FORM_BYTES:
            form = content[begin : begin + 16]
        elif kind == b"LIST":
            if not _has_plain_texts(content[begin : begin + length], length):
                return None
        # Refuses a second file, too, and a second `data`, as libsndfile does.
        elif kind not in _SKIPPED or length % 2 or length < _SKIPPED[kind]:
            return None
        begin += length
    return _checked(form, *data) if begin == size else None


def starts_of_files(ranges: ByteRanges, start: int) -> list[int]:
    """Returns the positions of joined files of WAV, AIFF, RF64, W64 or CAF.

    Args:
        ranges: The file.
        start: Where the first one begins, which may be of any format.
    """
    starts = [start]
    while (following := _end_of_file(ranges, starts[-1])) is not None:
        starts.append(following)
    return starts


def _end_of_file(ranges: ByteRanges, start: int) -> int | None:
    """Returns the end that the header of a file gives, if another file begins there.

    A file that a program wrote to a pipe has no length, and so no end.
    """
    head = ranges.at(start, 28)
    if order := _byte_order(head):
        length = int.from_bytes(head[20:28], order) if head[:4] == b"RF64" else int.from_bytes(head[4:8], order)
        end = start + 8 + length + length % 2
    elif head.startswith(_W64):
        end = start + int.from_bytes(head[16:24], "little")
    elif head.startswith(_CAF):
        end = start + len(_CAF)
        for _ in range(_MAX_CHUNKS):
            chunk = ranges.at(end, 12)
            if len(chunk) < 12 or chunk.startswith(_CAF):
                break
            if chunk.startswith(_CAF, 1):  # libsndfile writes a zero behind samples of an odd length
                end += 1
                break
            end += 12 + int.from_bytes(chunk[4:], "big")
    else:
        return None
    head = ranges.at(end, 16)
    return end if end > start and (_byte_order(head) or head.startswith((_W64, _CAF))) else None


def _byte_order(head: bytes) -> Literal["little", "big"] | None:
    """Returns the byte order of the lengths in a WAV, AIFF or RF64 file, given its start; None for another file."""
    return _BYTE_ORDERS.get((head[:4], head[8:12]))


class RiffSamples(NamedTuple):
    """Where the samples of a WAV or AIFF file are."""

    begin: int
    length: int
    """Number of bytes that the header gives."""

    is_mpeg: bool
    """Whether they are a stream of MPEG audio, whose length libsndfile takes from an estimate of the writer."""

    ends_early: bool
    """Whether the file has fewer bytes than its header says, unless it was written to a pipe."""


def find_samples(ranges: ByteRanges, start: int, end: int) -> RiffSamples | None:
    """Finds the samples of a WAV or AIFF file from `start` up to `end`; returns None if there are none."""
    order = _byte_order(ranges.at(start, 12))
    position, long_length, tag, block_bytes = start + 12, 0, 0, 1
    while order and position < end and len(head := ranges.at(position, 8)) == 8 and head[:4] != bytes(4):
        kind, length, begin = head[:4], int.from_bytes(head[4:], order), position + 8
        if kind == b"ds64":
            long_length = int.from_bytes(ranges.at(begin + 8, 8), order)
        elif kind == b"fmt ":
            form = ranges.at(begin, 14)
            tag, block_bytes = int.from_bytes(form[:2], order), max(1, int.from_bytes(form[12:], order))
        elif kind in (b"data", b"SSND"):
            length = long_length or length
            is_streamed = length in (*_STREAMED_BYTES, _STREAMED_BLOCKS // block_bytes * block_bytes)
            return RiffSamples(begin, length, tag in _MPEG_TAGS, begin + length > ranges.size and not is_streamed)
        position = begin + length + length % 2
    return None


def _has_plain_texts(block: bytes, length: int) -> bool:
    """Returns whether a `LIST` of `length` bytes holds texts such as `INAM` and nothing else, as most writers write it.

    libsndfile looks into it for other chunks, and takes a `data` that it finds there for the samples.
    """
    if len(block) != length or block[:4] != b"INFO":
        return False
    begin = 4
    while begin < length:
        num_bytes = int.from_bytes(block[begin + 4 : begin + 8], "little")
        if block[begin] != ord("I") or num_bytes > _MAX_TEXT_BYTES:
            return False
        begin += 8 + num_bytes + num_bytes % 2
    return begin == length


def _checked(form: bytes, begin: int, length: int) -> WavHeader | None:
    """Returns the header, given the content of `fmt `, and begin and length of `data`."""
    if len(form) < 16:
        return None
    tag, num_channels, rate, bytes_per_second, bytes_per_frame, bits = struct.unpack("<HHIIHH", form)
    is_plain = (tag, bits, bytes_per_frame) == (_PCM, 16, 2 * num_channels) and rate
    if not is_plain or not 1 <= num_channels <= _MAX_CHANNELS or bytes_per_second != rate * bytes_per_frame:
        return None
    if not length or length % bytes_per_frame:
        return None
    return WavHeader(rate, num_channels, length // bytes_per_frame, begin)
