"""Encoded audio, in a file or in memory, which is opened with the decoder that can read it.

libsndfile and dr_flac decode bytes in memory to the same samples as a file with these bytes. libsndfile would end too
early in a format without a header (MPEG), in a file of several streams (Ogg, MPEG), and in joined files: of these, it
reads the streams one by one. Formats that libsndfile does not know are left to torchcodec.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import NamedTuple

from nestdata.audio import flac, mpeg, not_audio, ogg, torchcodec_audio, wav
from nestdata.audio.byte_ranges import ByteRanges, SplicedStream
from nestdata.audio.file_kind import check_regular_file, special_file_kind
from nestdata.audio.parts import AudioPart, JoinedAudio, SoundFileAudio
from nestdata.audio.reader import AudioReader
from nestdata.audio.torchcodec_audio import TorchcodecAudio
from nestdata.audio.wav import PlainWav
from nestdata.errors import AudioReason

# Holds the first frame of MPEG with a short ID3v2 tag before it.
_HEAD_BYTES = 1 << 12
_MPEG_STARTS = (b"ID3", b"\xff")
_AU_MAGIC = b".snd"
# In seconds: if a cut ends this much after the length in a header, rounding of its duration is not the reason.
_MIN_EXCESS_S = 0.01


class EncodedAudio(NamedTuple):
    """An audio file, or its bytes in memory."""

    path: str
    """Path of the file; with `content`, only a name for messages."""

    content: bytes | None = None
    """The bytes of the file if they have been read; the file is then not opened."""

    @contextmanager
    def open(self, min_seconds: float = 0.0) -> Iterator[AudioReader]:
        """Opens the audio.

        Args:
            min_seconds: Position in seconds up to which the caller reads; 0 if it is not known. If the header of FLAC
                gives less, other files are looked for behind the first one.

        Raises:
            OSError: The file cannot be opened, or it is a directory, pipe, socket or device, which is never opened.
            MixedStreamsError: The file is several files or streams of different form.
            soundfile.LibsndfileError: No decoder knows the format.
        """
        if self.content is not None:
            with self._reader(ByteRanges.of_bytes(self.content), None, min_seconds) as file:
                yield file
            return
        check_regular_file(self.path)
        descriptor = os.open(self.path, os.O_RDONLY)
        ranges = ByteRanges.of_file(descriptor, os.fstat(descriptor).st_size)
        try:
            with self._reader(ranges, lambda: open_copy(descriptor), min_seconds) as file:
                yield file
        finally:
            os.close(descriptor)
            ranges.check()

    def _reader(
        self, ranges: ByteRanges, open_whole: Callable[[], SoundFileAudio] | None, min_seconds: float
    ) -> AudioReader:
        import soundfile

        header = wav.parse_header(ranges.at(0, wav.HEAD_BYTES), ranges.size)
        ranges.check()
        if header:
            return PlainWav(header, ranges)
        try:
            return open_ranges(ranges, open_whole, min_seconds)
        except soundfile.LibsndfileError as error:
            return self._open_other(error, min_seconds)

    def _open_other(self, error: Exception, min_seconds: float) -> TorchcodecAudio:
        """Opens audio of a format that libsndfile does not know, or raises libsndfile's error, the clearest one."""
        if not_audio.may_name_files(self._head(not_audio.PLAYLIST_BYTES)) or torchcodec_audio.problem():
            raise error
        # FFmpeg finds no audio, and torchcodec raises errors of many types. Not kept as the context of `error`: they
        # hold the file open.
        with suppress(Exception):
            source = os.path.abspath(self.path) if self.content is None else self.content
            return TorchcodecAudio(source, min_seconds)
        raise error

    def read_flac(self) -> flac.FlacFile | None:
        """Returns the audio as a FLAC file that dr_flac can decode; None if libsndfile has to decode it."""
        return flac.read_flac(self.path) if self.content is None else flac.parse_flac(self.content)

    def size(self) -> int:
        """Returns the number of bytes.

        Raises:
            OSError: The file does not exist.
        """
        return os.path.getsize(self.path) if self.content is None else len(self.content)

    def kind_if_not_audio(self) -> str:
        """Returns what the file is if it is recognisable and not audio, and what to do about it; else an empty text."""
        head = self._head(not_audio.HEAD_BYTES)
        begins_with_zeros = len(head) == not_audio.HEAD_BYTES and not head.strip(b"\0")
        zeros_precede_audio = begins_with_zeros and self._head(not_audio.PLAYLIST_BYTES).strip(b"\0")
        return "" if _name_of(head) or zeros_precede_audio else not_audio.kind_of(head)

    def has_no_sound(self) -> bool:
        """Returns whether FFmpeg knows the format, and finds pictures only; to be asked when no decoder reads it."""
        if torchcodec_audio.problem() or not_audio.may_name_files(self._head(not_audio.PLAYLIST_BYTES)):
            return False
        return torchcodec_audio.has_no_sound(os.path.abspath(self.path) if self.content is None else self.content)

    def advice(self) -> str:
        """Returns what to do about a format that cannot be read, as the end of a message; empty if nothing is known."""
        if not (name := _name_of(self._head(not_audio.HEAD_BYTES))):
            kind = self.kind_if_not_audio()
            return f"; it is {kind}" if kind else ""
        if name == "SPHERE":
            return "; SPHERE files are read if they are not compressed: convert this one, for example with sph2pipe"
        problem = torchcodec_audio.problem()
        return f"; {problem}, or convert the file to FLAC ({name})" if problem else "; FFmpeg cannot read it, either"

    def _head(self, num_bytes: int) -> bytes:
        """Returns the first bytes; none if the file cannot be read."""
        if self.content is not None:
            return self.content[:num_bytes]
        try:
            check_regular_file(self.path)
            with open(self.path, "rb") as file:
                return file.read(num_bytes)
        except (OSError, ValueError):
            return b""

    def failure_reason(self, error: Exception) -> AudioReason:
        """Classifies a failure to decode the audio."""
        import soundfile

        if self.content is None:
            if special_file_kind(self.path):
                return "not_a_file"
            if not os.path.isfile(self.path):
                return "missing" if isinstance(error, soundfile.LibsndfileError | OSError) else "unreadable"
        if not self.size():
            return "empty"
        try:
            with self.open() as file:
                if file.num_samples == 0:
                    return "empty"
                if file.num_samples is None:
                    return "unreadable"
                try:
                    file.seek(file.num_samples - 1)
                    return "unreadable" if len(file.read(1)) else "truncated"
                except soundfile.LibsndfileError:
                    return "truncated"  # the header is valid, but the end that it describes is missing
        except (RuntimeError, ValueError, OSError):  # libsndfile and torchcodec raise RuntimeErrors
            return "unreadable"


def open_ranges(
    ranges: ByteRanges,
    open_whole: Callable[[], SoundFileAudio] | None = None,
    min_seconds: float = 0.0,
    *,
    searches: bool = False,
) -> AudioReader:
    """Opens audio that libsndfile decodes.

    Args:
        ranges: The bytes of the audio.
        open_whole: Opens all of them with libsndfile, if that is faster than by `ranges`.
        min_seconds: As for `EncodedAudio.open`.
        searches: Whether to look for FLAC files behind the first one whatever its header says.

    Raises:
        MixedStreamsError: The file is several files or streams of different form.
        soundfile.LibsndfileError: The file has no audio format that libsndfile reads.
    """
    open_whole = open_whole or (lambda: SoundFileAudio(SplicedStream(ranges)))
    head = ranges.at(0, _HEAD_BYTES)
    if head.startswith(b"OggS"):
        links = ogg.links_of(ranges)
        if len(links) > 1 or any(link.is_flac or not link.is_clean for link in links):
            return JoinedAudio([AudioPart(ranges, link.pieces, is_clean=link.is_clean) for link in links])
        return open_whole()
    tag_length = mpeg.tag_length(head)
    starts = wav.starts_of_files(ranges, tag_length)
    spans = pairwise([*starts, ranges.size])
    streams = [stream for start, end in spans if (stream := wav.find_samples(ranges, start, end))]
    if mpeg_streams := [stream for stream in streams if stream.is_mpeg]:
        parts = [part for each in mpeg_streams for part in _mpeg_parts(ranges.part(each.begin, each.length))]
        return JoinedAudio(parts, ends_early=mpeg_streams[-1].ends_early)
    if len(starts) > 1:
        return _files_at(ranges, starts)
    if head.startswith(_MPEG_STARTS) and (start := mpeg.find_start(ranges)) is not None:
        return _open_mpeg(ranges, open_whole, start)
    if head.startswith(_AU_MAGIC):
        # The samples end with the file whatever length the header gives, as in FFmpeg, and as in SPHERE files.
        return JoinedAudio([AudioPart(ranges, [head[:8] + b"\xff" * 4, (12, ranges.size - 12)])])
    file = open_whole()
    file.ends_early = bool(streams) and streams[0].ends_early
    if file.format == "MP3" and (start := mpeg.find_start(ranges, searches=True)) is not None:
        file.close()
        return _open_mpeg(ranges, open_whole, start)
    claimed = file.num_samples
    is_longer = claimed is None or (min_seconds - _MIN_EXCESS_S) * file.rate > claimed
    if file.format == "FLAC" and (searches or is_longer):
        starts = flac.starts_of_files(ranges, tag_length)
        if len(starts) > 1:
            file.close()
            return _files_at(ranges, starts)
    return file


def _files_at(ranges: ByteRanges, starts: list[int]) -> JoinedAudio:
    """Opens the files that begin at several bytes as one."""
    spans = pairwise([*starts, ranges.size])
    return JoinedAudio([AudioPart(ranges, [(start, end - start)]) for start, end in spans])


def _open_mpeg(ranges: ByteRanges, open_whole: Callable[[], SoundFileAudio], start: int) -> AudioReader:
    found = mpeg.parts_of(ranges, start)
    return JoinedAudio(found[0], ends_early=found[1]) if found else open_whole()


def _mpeg_parts(ranges: ByteRanges) -> list[AudioPart]:
    """Returns the parts of MPEG audio in another file; one whose end is not known is decoded to find it."""
    start = mpeg.find_start(ranges, searches=True)
    found = None if start is None else mpeg.parts_of(ranges, start)
    return found[0] if found else [AudioPart(ranges, [(0, ranges.size)], is_clean=False)]


def open_copy(descriptor: int) -> SoundFileAudio:
    """Opens a file at its start, and leaves the descriptor open; they share a position."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    # libsndfile closes the copy, even if it does not know the format.
    return SoundFileAudio(os.dup(descriptor))


def _name_of(head: bytes) -> str:
    """Returns the name of a format that libsndfile does not know, or not in all forms; empty for other formats."""
    if head[4:8] == b"ftyp":
        return "M4A"
    if head.startswith(b"OggS") and head[28:36] == b"Speex   ":
        return "Speex"
    return next((name for start, name in _NAMES.items() if head.startswith(start)), "")


_NAMES = {
    b"NIST_1A": "SPHERE",
    b"0&\xb2u\x8ef\xcf\x11": "WMA",
    b"\x1a\x45\xdf\xa3": "WebM or Matroska",
    b"\xff\xf1": "AAC",
    b"\xff\xf9": "AAC",
    b"#!AMR": "AMR",
    b"FLV\x01": "FLV",
    b"wvpk": "WavPack",
    b"MAC ": "Monkey's Audio",
    b"TTA1": "True Audio",
    b"\x0b\x77": "AC-3",
}
