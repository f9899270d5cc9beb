"""Frames of MPEG audio (MP3, MP2, MP1): how many there are, and where, without decoding them.

An MPEG file has no header of its own. Encoders that can seek in their output put a tag (Xing, Info or VBRI) into the
first frame, with the number of frames. Without one, libsndfile estimates the length from the size of the file and of
the first frame, and gives no sample beyond the estimate. If files are joined, the tag of the first covers only that
file. So the frames are counted here, by their headers, unless the tag accounts for every byte of the file.

Layouts: ISO/IEC 11172-3, section 2.4.1.3, and 13818-3; the tags as in LAME's VbrTag.c.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from nestdata.audio.byte_ranges import ByteRanges, Piece
from nestdata.audio.parts import AudioPart
from nestdata.audio.reader import MixedStreamsError

# kbit/s by index, for (is MPEG-1, layer).
_BITRATES = {
    (True, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = (44100, 48000, 32000)
# By the two bits of the version: MPEG-2.5, reserved, MPEG-2, MPEG-1.
_RATE_DIVISORS = (4, 0, 2, 1)
# The first three bytes of a frame, as far as `parse_frame` accepts them, or the start of a tag.
_SECOND = bytes(byte for byte in range(0xE0, 0x100) if byte >> 3 & 3 != 1 and byte >> 1 & 3)
_THIRD = bytes(byte for byte in range(0x10, 0xF0) if byte >> 2 & 3 != 3)
_SYNC_OR_TAG = re.compile(b"\xff(?=[%b][%b])|ID3|APETAGEX" % (re.escape(_SECOND), re.escape(_THIRD)))
_ID3V1_BYTES, _APE_BYTES = 128, 32
_BLOCK_BYTES = 1 << 20
# Bytes that a stream claims beyond its end, at least; libsndfile looks for tags there.
_MARGIN_BYTES = 1 << 16
# 384 kbit/s at 32 kHz in layer 2, with padding.
_MAX_FRAME_BYTES = 1729
# So many consecutive frames of another rate, layer or number of channels are not chance, but another stream.
_FRAMES_OF_STREAM = 4


class FrameHeader(NamedTuple):
    """What the four bytes at the start of a frame say."""

    version: int
    """The two bits of the version: 3 for MPEG-1, 2 for MPEG-2, 0 for MPEG-2.5."""

    layer: int
    rate: int
    """In Hz."""

    is_mono: bool
    num_bytes: int
    """Length of the frame."""

    @property
    def num_samples(self) -> int:
        """Samples of each channel in a frame."""
        return 384 if self.layer == 1 else 576 if self.layer == 3 and self.version != 3 else 1152

    @property
    def form(self) -> tuple[int, int, int, bool]:
        """What all frames of a stream have in common."""
        return self[:4]


class Tag(NamedTuple):
    """A tag in the first frame."""

    num_frames: int
    """Number of frames after the tag's own; 0 if it is not given."""

    num_bytes: int
    """Number of bytes of the stream, with or without the tag's own frame; 0 if it is not given."""


def parse_frame(head: bytes) -> FrameHeader | None:
    """Parses the header of a frame; None for other bytes, and for a free bit rate, with which the length is unknown."""
    if len(head) < 4 or head[0] != 0xFF or head[1] < 0xE2:
        return None
    version, layer = head[1] >> 3 & 3, 4 - (head[1] >> 1 & 3)
    bitrate_index, rate_index, padding = head[2] >> 4, head[2] >> 2 & 3, head[2] >> 1 & 1
    if version == 1 or layer == 4 or rate_index == 3 or not 1 <= bitrate_index <= 14:
        return None
    rate = _RATES[rate_index] // _RATE_DIVISORS[version]
    bitrate = 1000 * _BITRATES[version == 3, layer][bitrate_index - 1]
    if layer == 1:
        num_bytes = (12 * bitrate // rate + padding) * 4
    else:
        num_bytes = (72 if layer == 3 and version != 3 else 144) * bitrate // rate + padding
    return FrameHeader(version, layer, rate, head[3] >> 6 == 3, num_bytes)


def parse_tag(frame: bytes) -> Tag | None:
    """Parses the tag in a whole frame; None if the frame holds audio."""
    header = parse_frame(frame)
    if header is None or header.layer != 3:
        return None
    if header.version == 3:
        start = 21 if header.is_mono else 36
    else:
        start = 13 if header.is_mono else 21
    if frame[start : start + 4] in (b"Xing", b"Info"):
        flags = int.from_bytes(frame[start + 4 : start + 8], "big")
        counts = [int.from_bytes(frame[at : at + 4], "big") for at in (start + 8, start + 12)]
        num_frames = counts.pop(0) if flags & 1 else 0
        return Tag(num_frames, counts.pop(0) if flags & 2 else 0)
    if frame[36:40] == b"VBRI":
        return Tag(int.from_bytes(frame[50:54], "big"), int.from_bytes(frame[46:50], "big"))
    return None


def find_start(ranges: ByteRanges, *, searches: bool = False) -> int | None:
    """Returns the position of the first frame, behind ID3v2 tags.

    Args:
        ranges: The file.
        searches: Whether other bytes may come before it, in a file that libsndfile recognises as MPEG audio.

    Returns:
        None if no frame is found, or if the frame has a free bit rate.
    """
    start = 0
    while skipped := tag_length(ranges.at(start, _APE_BYTES)):
        start += skipped
    header = parse_frame(ranges.at(start, 4))
    if header and (
        start + header.num_bytes == ranges.size
        or _frames_in_a_row(ranges, start, header) >= 2
        or parse_tag(ranges.at(start, header.num_bytes))  # whatever is behind it
    ):
        return start
    return _next_frame(ranges, start, None) if searches else None


def _accounts_for(tag: Tag, ranges: ByteRanges, start: int, header: FrameHeader) -> bool:
    if not tag.num_frames or not tag.num_bytes:
        return False
    num_behind = ranges.size - start - tag.num_bytes
    # Some encoders do not count the frame of the tag. If there are bytes behind, they may be tags as well.
    return num_behind in (0, header.num_bytes) or num_behind - _trailing_bytes(ranges) in (0, header.num_bytes)


def parts_of(ranges: ByteRanges, start: int) -> tuple[list[AudioPart], bool] | None:
    """Counts the frames of a file, unless its tag accounts for all bytes.

    Args:
        ranges: The file.
        start: Position of the first frame.

    Returns:
        How to decode the file, and whether it has fewer frames than its tag says; None if libsndfile finds the length
        in the tag.

    Raises:
        MixedStreamsError: Streams of different rates, layers or numbers of channels are joined.
    """
    head = ranges.at(start, 4)
    header = parse_frame(head)
    assert header is not None  # a frame begins at `start`
    tag = parse_tag(ranges.at(start, header.num_bytes))
    if tag and _accounts_for(tag, ranges, start, header):
        return None
    runs = list(_runs(ranges, start, header))
    num_frames = sum(len(run.sizes) for run in runs) - bool(tag)
    if tag and 0 < tag.num_frames == num_frames:
        # libmpg123 does not skip everything that may be between frames.
        return None if len(runs) == 1 else ([AudioPart(ranges, _pieces_of(ranges, runs))], False)
    if tag and num_frames + 1 < tag.num_frames:
        # At another size than the tag gives, libmpg123 writes a line to the terminal.
        part = AudioPart(ranges, _pieces_of(ranges, runs), claimed_size=tag.num_bytes, is_clean=False)
        return [part], True
    parts = []
    num_before = 0
    # libsndfile opens no stream of a single frame: such a file is decoded as if it had no tag.
    if tag and 0 < tag.num_frames < num_frames - 1:
        num_before = tag.num_frames
        parts.append(AudioPart(ranges, _pieces_of(ranges, runs, limit=1 + num_before)))
    rest = _pieces_of(ranges, runs, skipped=bool(tag) + num_before)
    num_left = num_frames - num_before
    claimed_size = num_left * _MAX_FRAME_BYTES + _MARGIN_BYTES
    parts.append(AudioPart(ranges, rest, num_left * header.num_samples, claimed_size))
    return parts, False


class _Run(NamedTuple):
    """Frames that follow each other without a gap."""

    start: int
    sizes: list[int]


def _runs(ranges: ByteRanges, start: int, header: FrameHeader) -> Iterator[_Run]:
    """Yields the frames of a file, without tags and damage between them.

    Raises:
        MixedStreamsError: A stream of another rate, layer or number of channels follows.
    """
    lengths, is_mono = _lengths_by_bytes(header._replace(num_bytes=0)), header.is_mono
    block, block_start = b"", 0
    found: int | None = start
    while found is not None:
        sizes: list[int] = []
        position = found
        while True:
            at = position - block_start
            if at + 4 > len(block):
                block, block_start, at = ranges.at(position, _BLOCK_BYTES), position, 0
            length = lengths.get(block[at : at + 3], 0)
            if not length or position + length > ranges.size or (block[at + 3 : at + 4] > b"\xbf") is not is_mono:
                break
            sizes.append(length)
            position += length
        if sizes:
            yield _Run(found, sizes)
        found = _next_frame(ranges, position, header)


@cache
def _lengths_by_bytes(header: FrameHeader) -> dict[bytes, int]:
    """Returns the lengths of all frames of the same form as `header`, by their first three bytes."""
    found = {}
    for second in (0xE0 | header.version << 3 | (4 - header.layer) << 1 | no_checksum for no_checksum in (0, 1)):
        for third in range(256):
            other = parse_frame(bytes((0xFF, second, third, 0xC0 if header.is_mono else 0)))
            if other and other.form == header.form:
                found[bytes((0xFF, second, third))] = other.num_bytes
    return found


def _next_frame(ranges: ByteRanges, position: int, header: FrameHeader | None) -> int | None:
    """Returns the position of the next frame of the form of `header` at or after a position, or None.

    Without a header, it is the first frame of a stream of any form.

    Raises:
        MixedStreamsError: A stream of another form comes first.
    """
    for at in ranges.find_all(_SYNC_OR_TAG, position):
        if at < position:  # in a tag
            continue
        head = ranges.at(at, _APE_BYTES)
        if skipped := tag_length(head):
            position = at + skipped
        elif found := parse_frame(head):
            num_frames = _frames_in_a_row(ranges, at, found)
            if header is None:
                if num_frames == _FRAMES_OF_STREAM:
                    return at
            elif found.form == header.form and (num_frames >= 2 or at + found.num_bytes == ranges.size):
                return at
            elif found.form != header.form and num_frames == _FRAMES_OF_STREAM:
                raise MixedStreamsError(
                    f"byte {at} begins {_named(found)}, joined to {_named(header)}: divide the file there"
                )
    return None


def _frames_in_a_row(ranges: ByteRanges, position: int, header: FrameHeader) -> int:
    """Returns how many whole frames of one form follow each other, at most `_FRAMES_OF_STREAM`."""
    found, num_frames = header, 0
    while num_frames < _FRAMES_OF_STREAM and position + found.num_bytes <= ranges.size:
        num_frames += 1
        position += found.num_bytes
        following = parse_frame(ranges.at(position, 4))
        if following is None or following.form != header.form:
            break
        found = following
    return num_frames


def _named(header: FrameHeader) -> str:
    channels = "one channel" if header.is_mono else "two channels"
    return f"MPEG audio of {header.rate} Hz, layer {header.layer} and {channels}"


def _pieces_of(ranges: ByteRanges, runs: list[_Run], *, skipped: int = 0, limit: int | None = None) -> list[Piece]:
    """Returns the frames of runs from `skipped` up to `limit`.

    If frames are skipped and the next one has a tag, a silent frame replaces it: inside a stream, decoders play a tag
    as silence.
    """
    pieces: list[Piece] = []
    first = 0
    for start, sizes in runs:
        chosen = slice(max(0, skipped - first), None if limit is None else max(0, limit - first))
        begin, length = start + sum(sizes[: chosen.start]), sum(sizes[chosen])
        if length:
            pieces.append((begin, length))
        first += len(sizes)
    if skipped and pieces:
        begin, length = pieces[0]
        head = ranges.at(begin, 4)
        frame = parse_frame(head)
        if frame and parse_tag(ranges.at(begin, frame.num_bytes)):
            silent = head + bytes(frame.num_bytes - len(head))
            pieces[:1] = [silent, (begin + frame.num_bytes, length - frame.num_bytes)]
    return pieces


def tag_length(head: bytes) -> int:
    """Returns the length of an ID3v2 or APE tag that begins with these bytes; 0 if none does."""
    if head[:3] == b"ID3" and len(head) >= 10 and head[3] < 0xFF and head[4] < 0xFF and max(head[6:10]) < 0x80:
        length = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
        return length + (20 if head[5] & 0x10 else 10)
    if head[:8] == b"APETAGEX" and len(head) >= _APE_BYTES:
        return int.from_bytes(head[12:16], "little") + (_APE_BYTES if head[23] & 0x20 else 0)
    return 0


def _trailing_bytes(ranges: ByteRanges) -> int:
    """Returns the length of an ID3v1 tag, and of an APE tag before it, at the end of a file."""
    tail = ranges.at(max(0, ranges.size - _ID3V1_BYTES - _APE_BYTES), _ID3V1_BYTES + _APE_BYTES)
    found = _ID3V1_BYTES if tail[-_ID3V1_BYTES:][:3] == b"TAG" else 0
    footer = tail[len(tail) - found - _APE_BYTES :][:_APE_BYTES]
    if footer[:8] == b"APETAGEX":
        found += int.from_bytes(footer[12:16], "little") + (_APE_BYTES if footer[23] & 0x80 else 0)
    return found
