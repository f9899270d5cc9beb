"""Reads the headers of audio files: sampling rate, length and channels, or why the audio cannot be used.

The headers of plain FLAC and WAV files are parsed here, in a twentieth of libsndfile's time. Everything else is opened
as for decoding. If the header gives no length, or only part of it, the samples are counted: by frames or pages if
possible, otherwise by decoding.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

from nestdata.audio import flac, mpeg, wav
from nestdata.audio.byte_ranges import ByteRanges
from nestdata.audio.encoded import EncodedAudio, open_copy, open_ranges
from nestdata.audio.file_kind import check_regular_file, special_file_kind
from nestdata.audio.parts import JoinedAudio, SoundFileAudio
from nestdata.audio.reader import AudioReader, MixedStreamsError
from nestdata.errors import AudioError
from nestdata.prepare.inputs.audio import HEAD_BYTES, File, Member, Unusable
from nestdata.storage import FileVersion, is_url

_FLAC_MAGIC = b"fLaC"
# Largest number of samples of a channel per byte of a file; more are a mistake in its header. It is FLAC's: up to 65535
# samples in a frame of 12 bytes, 8 for the header, 2 for a constant of 4 bits, 2 for the checksum (RFC 9639, sections
# 9.1 to 9.3).
_MAX_SAMPLES_PER_BYTE = 65535 / 12


class AudioInfo(NamedTuple):
    """Properties of an audio file or recording, known without decoding it."""

    rate: int
    num_frames: int
    num_channels: int
    ends_early: bool = False
    """Whether the file is shorter than its own header says."""

    version: FileVersion | None = None
    """The version of a local file; None for a member, and if no file was opened."""


def read_header(audio: File | Member, *, searches: bool = False) -> AudioInfo | Unusable:
    """Reads the header of an audio file or of a member.

    Args:
        audio: The audio.
        searches: Whether to look for a second file in all bytes of FLAC; if not, its last frame is compared with its
            header.

    Raises:
        StorageError: The member cannot be read.
    """
    import soundfile

    try:
        if isinstance(audio, File):
            info, size = _header_of_file(audio.location, searches)
        else:
            is_distant = is_url(audio.location) and not audio.is_loaded
            info, size = _header_in(audio.ranges(), None, searches, is_distant=is_distant), audio.length
    except (MixedStreamsError, AudioError) as error:
        return Unusable("unreadable", f"{audio}: {error}")
    except (soundfile.LibsndfileError, OSError, ValueError) as error:
        found = _header_after(error, audio)
        if isinstance(found, Unusable):
            return found
        info, size = found
    if info.num_frames > _MAX_SAMPLES_PER_BYTE * size:
        detail = f"{audio}: its header gives {info.num_frames} samples, too many for {size} bytes"
        return Unusable("truncated", detail)
    if info.num_frames <= 0:
        return Unusable("empty", f"{audio} holds no samples")
    return info


def _header_of_file(path: str, searches: bool) -> tuple[AudioInfo, int]:
    """Returns the header of a file and its size.

    Raises OSError, ValueError, soundfile.LibsndfileError.
    """
    check_regular_file(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        info = _header_in(ByteRanges.of_file(descriptor, status.st_size), lambda: open_copy(descriptor), searches)
    finally:
        os.close(descriptor)
    # Not by `_replace`, which takes a fiftieth of the time of a line.
    return AudioInfo(
        info.rate, info.num_frames, info.num_channels, info.ends_early, FileVersion.of(status)
    ), status.st_size


def _header_in(
    ranges: ByteRanges, open_whole: Callable[[], SoundFileAudio] | None, searches: bool, *, is_distant: bool = False
) -> AudioInfo:
    """Returns the header of audio.

    Args:
        ranges: The bytes.
        open_whole: As for `open_ranges`.
        searches: As for `read_header`.
        is_distant: Whether each read is a request to a store.

    Raises the same errors as `_header_of_file`, and errors of reading the bytes.
    """
    head = ranges.at(0, HEAD_BYTES)
    info = _plain_header(head, ranges.size)
    start = mpeg.tag_length(head)
    behind_tag = ranges.at(start, HEAD_BYTES) if start else head
    if behind_tag.startswith(_FLAC_MAGIC) and not is_distant:
        header, last = flac.stream_info(behind_tag), flac.last_sample(behind_tag, ranges)
        if searches or header.num_samples != last or flac.is_too_large(behind_tag, header, ranges.size):
            with open_ranges(ranges, open_whole, searches=True) as file:
                if isinstance(file, JoinedAudio):
                    info = _info_of(file)
                elif header.num_samples != last:
                    info = _counted_flac(file, header.num_samples, (last or 0) - flac.block_size(behind_tag))
    if info is None:
        if is_distant:
            ranges.at(HEAD_BYTES, 1)  # not under the lock of the process that soundfile holds while it opens a stream
        try:
            with open_ranges(ranges, open_whole) as file:
                info = _info_of(file)
        finally:
            ranges.check()
    ranges.check()
    return info


def _plain_header(head: bytes, size: int) -> AudioInfo | None:
    """Parses the start of a file of `size` bytes; returns None if libsndfile has to read the header."""
    found = flac.parse_header(head) or wav.parse_header(head, size)
    return AudioInfo(found.rate, found.num_samples, found.num_channels) if found else None


def _counted_flac(file: AudioReader, claimed: int, last_block: int) -> AudioInfo:
    """Returns the header of an open FLAC file with the number of samples that can be decoded.

    Args:
        file: The file.
        claimed: Number of samples that its header gives; 0 if it gives none.
        last_block: First sample of its last frame, which may be cut off; negative if none is found.

    Raises:
        AudioError: Its header gives no length, and frames follow behind damage.
    """
    num_samples = file.skip()
    if not claimed and last_block > num_samples:
        after, seconds = num_samples / file.rate, (last_block - num_samples) / file.rate
        raise AudioError(f"damaged after {after:.2f} s, and {seconds:.2f} s follow")
    return AudioInfo(file.rate, num_samples, file.num_channels, num_samples < claimed)


def _info_of(file: AudioReader) -> AudioInfo:
    """Returns the header of an open file; counts the samples if they are not known."""
    return AudioInfo(file.rate, file.count(), file.num_channels, file.ends_early)


def _header_after(error: Exception, audio: File | Member) -> tuple[AudioInfo, int] | Unusable:
    """Returns why libsndfile could not read a header, or the header that another decoder found, and the size.

    The causes are examined only after a failure, because most files are valid and every call costs time.
    """
    if isinstance(audio, File):
        path = audio.location
        if kind := special_file_kind(path):
            return Unusable("not_a_file", f"{path} is {kind}")
        if isinstance(error, PermissionError):
            return Unusable("unreadable", f"{path} cannot be opened ({error.strerror}); grant read permission")
        if not os.path.isfile(path):
            return Unusable("missing", f"{path} does not exist{audio.hint}")
    encoded = EncodedAudio(str(audio), audio.read())
    if not encoded.size():
        return Unusable("empty", f"{audio} has no bytes")
    if kind := encoded.kind_if_not_audio():
        return Unusable("not_audio", f"{audio} is {kind}")
    try:
        with encoded.open() as file:
            info = _info_of(file)
    except (RuntimeError, ValueError) as other:  # libsndfile and torchcodec raise RuntimeErrors
        error = other
        if encoded.has_no_sound():
            return Unusable("not_audio", f"{audio} has pictures and no sound: leave it out")
    else:
        if isinstance(audio, Member):
            return info, audio.length
        status = os.stat(audio.location)
        return info._replace(version=FileVersion.of(status)), status.st_size
    # libsndfile's own message: soundfile adds the file descriptor, which differs between processes.
    detail = " ".join(getattr(error, "error_string", str(error)).split())[:300].rstrip(".")
    return Unusable("unreadable", f"{audio}: {detail}{encoded.advice()}")
