"""Pages of Ogg files: the streams that are chained in a file, found without decoding them.

libsndfile decodes only the first stream of a chain, and no FLAC in Ogg. So the streams of a chain are decoded one after
the other, and the packets of FLAC are joined and decoded as a FLAC file.

Layout: RFC 3533; FLAC: RFC 9639, section 10.1.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from nestdata.audio.byte_ranges import ByteRanges, Piece
from nestdata.audio.reader import MixedStreamsError

# The capture pattern and the version.
_FIRST_BYTES = b"OggS\0"
_PAGE_START = re.compile(_FIRST_BYTES)
_HEAD_BYTES = 27
_MAX_HEAD_BYTES = _HEAD_BYTES + 255
_MAX_PAGE_BYTES = _MAX_HEAD_BYTES + 255 * 255
_BEGINS_STREAM, _ENDS_STREAM = 2, 4
# Links of a file; more are damage, and each takes memory.
_MAX_LINKS = 10_000
# Streams of a link whose page numbers are followed; more are damage.
_MAX_SERIALS = 64
# Files of up to this size are read at once; of longer ones, only the heads of the pages.
_BLOCK_BYTES = 1 << 18
# Before the bytes of a FLAC file in the first packet: a byte and "FLAC", version, number of header packets.
_FLAC_MAGIC, _FLAC_PREFIX_BYTES = b"\x7fFLAC", 9


class OggLink(NamedTuple):
    """A stream of a chain."""

    pieces: list[Piece]
    """Its pages, or its packets if they make up a FLAC file."""

    is_clean: bool
    """Whether no page is missing, and nothing else is between the pages."""

    is_flac: bool


class _Page(NamedTuple):
    start: int
    body: int
    """Position of the first byte behind the head."""

    end: int
    begins_stream: bool
    ends_stream: bool
    serial: bytes
    number: int
    """Number in its stream."""


def links_of(ranges: ByteRanges) -> list[OggLink]:
    """Returns the streams of a file that begins with a page of Ogg; streams whose pages alternate are one link.

    Raises:
        MixedStreamsError: There are more than 10,000.
    """
    links: list[_Link] = []
    follows_beginning = False
    for page in _pages(ranges):
        if not links or (page.begins_stream and not follows_beginning):
            if len(links) == _MAX_LINKS:
                raise MixedStreamsError(f"more than {_MAX_LINKS:,} streams in one file: divide it")
            links.append(_Link(page.start))
        links[-1].add(page, ranges)
        follows_beginning = page.begins_stream
    if not links:  # cut off in its first page
        return [OggLink([(0, ranges.size)], is_clean=True, is_flac=False)]
    ends = [link.start for link in links[1:]] + [ranges.size]
    return [link.closed(end) for link, end in zip(links, ends, strict=True)]


def lacks_end_mark(ranges: ByteRanges) -> bool:
    """Returns whether a file is Ogg, and its last page is cut off or does not end its stream."""
    if ranges.at(0, len(_FIRST_BYTES)) != _FIRST_BYTES:
        return False
    tail = ranges.at(max(0, ranges.size - _MAX_PAGE_BYTES), _MAX_PAGE_BYTES)
    tail = tail[max(0, tail.rfind(_FIRST_BYTES)) :]
    last = next(_pages(ByteRanges.of_bytes(tail)), None)
    return last is None or not last.ends_stream


class _Link:
    """A link while its pages are found."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._end = start
        self._is_clean = True
        self._has_end = False
        self._numbers: dict[bytes, int] = {}
        self._flac_serial: bytes | None = None
        self._flac: list[Piece] = []

    def add(self, page: _Page, ranges: ByteRanges) -> None:
        """Adds the next page."""
        expected = self._numbers.get(page.serial, page.number - 1) + 1
        self._is_clean = self._is_clean and page.start == self._end and page.number == expected
        if len(self._numbers) < _MAX_SERIALS:
            self._numbers[page.serial] = page.number
        self._end = page.end
        self._has_end = page.ends_stream
        if page.serial == self._flac_serial:
            self._flac.append((page.body, page.end - page.body))
        elif page.begins_stream and not self._flac and ranges.at(page.body, len(_FLAC_MAGIC)) == _FLAC_MAGIC:
            first = page.body + _FLAC_PREFIX_BYTES
            self._flac_serial, self._flac = page.serial, [(first, max(0, page.end - first))]

    def closed(self, end: int) -> OggLink:
        """Returns the link; it extends to `end`."""
        if self._flac:
            # If the stream was cut off, it is shorter than the header of the FLAC file says.
            return OggLink(self._flac, self._is_clean and self._has_end, is_flac=True)
        return OggLink([(self.start, end - self.start)], self._is_clean and self._end == end, is_flac=False)


def _pages(ranges: ByteRanges) -> Iterator[_Page]:
    """Yields the pages of a file; skips other bytes between them, and a page that is cut off."""
    if ranges.size <= _BLOCK_BYTES:
        ranges = ByteRanges.of_bytes(ranges.at(0, ranges.size))
    position = 0
    while position + _HEAD_BYTES <= ranges.size:
        head = ranges.at(position, _MAX_HEAD_BYTES)
        if len(head) < _HEAD_BYTES:  # the file became shorter, or cannot be read
            return
        body = position + _HEAD_BYTES + head[26]
        end = body + sum(head[_HEAD_BYTES : body - position])
        if head[:5] == _FIRST_BYTES and end <= ranges.size:
            begins_stream, ends_stream = bool(head[5] & _BEGINS_STREAM), bool(head[5] & _ENDS_STREAM)
            number = int.from_bytes(head[18:22], "little")
            yield _Page(position, body, end, begins_stream, ends_stream, head[14:18], number)
            position = end
        else:
            position = next(ranges.find_all(_PAGE_START, position + 1), ranges.size)
