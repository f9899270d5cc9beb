"""Reads the headers of audio files: sampling rate, length and channels, or why the audio cannot be used.

The headers of plain FLAC and WAV files are parsed here, in a twentieth of libsndfile's time. Everything else is left to
libsndfile, which decides whether it can be used, and to the decoders of `nestdata.audio.lhotse_audio`.
"""

import os
import re
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from nestdata.audio import flac, wav
from nestdata.audio.encoded import EncodedAudio, open_descriptor, open_stream
from nestdata.audio.file_kind import check_regular_file, special_file_kind
from nestdata.audio.lhotse_audio import header_of_other_format
from nestdata.audio.sources import output_of
from nestdata.prepare.inputs.audio import Command, File, Member, Unusable
from nestdata.prepare.inputs.content import HEAD_BYTES, GuardedStream
from nestdata.storage import FileVersion

if TYPE_CHECKING:
    import soundfile

# Number of frames that libsndfile reports for a stream whose header does not give one.
_UNKNOWN_LENGTH = (1 << 63) - 1
# libsndfile's log entries for the number of bytes of samples in a header: of a WAV or AIFF file that has fewer, and of
# any RF64 file.
_ENDS_EARLY = re.compile(r"^ ?(?:data|SSND) : (\d+) \(should be (\d+)\)", re.MULTILINE)
_RF64_BYTES = re.compile(r"^ *Data size +: (\d+)$", re.MULTILINE)
_BLOCK_BYTES = re.compile(r"^ *Block Align +: (\d+)$", re.MULTILINE)
_FORMATS_WITH_BYTE_COUNT = frozenset({"WAV", "WAVEX", "AIFF"})
# What programs write as the number of bytes when they write to a pipe and cannot go back to the header:
# FFmpeg (riffenc.c), LAME (lame_main.c), and arecord, now and before it had a limit of 2 GiB (aplay.c).
_STREAMED_BYTES = frozenset({0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x7FFFFF00})
# SoX (wav.c, MS_UNSPEC) and eSpeak: this number, rounded down to whole blocks.
_STREAMED_BLOCKS = 0x7FFFF000


# Samples of a channel in each byte of a file: more is a mistake in its header. FLAC holds most, up to 65535 samples in
# a frame of 12 bytes: 8 for the header, 2 for a constant of 4 bits, 2 for the checksum (RFC 9639, sections 9.1 to 9.3).
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


def read_header(audio: File | Member | Command) -> AudioInfo | Unusable:
    """Reads the header of an audio file or of a member, or runs a command.

    Raises:
        StorageError: The member cannot be read.
    """
    import soundfile

    if isinstance(audio, Command):
        return _header_of_command(audio.command)
    try:
        info, size = _header_of_file(audio.location) if isinstance(audio, File) else _header_of_member(audio)
    except (soundfile.LibsndfileError, OSError, ValueError) as error:
        found = _header_after(error, audio)
        if isinstance(found, Unusable):
            return found
        info, size = found
    if info.num_frames >= _UNKNOWN_LENGTH:
        return Unusable("unknown_length", f"{audio}: its header does not give the number of samples; re-encode it")
    if info.num_frames > _MAX_SAMPLES_PER_BYTE * size:
        detail = f"{audio}: its header gives {info.num_frames} samples, too many for {size} bytes"
        return Unusable("truncated", detail)
    if info.num_frames <= 0:
        return Unusable("empty", f"{audio} holds no samples")
    return info


def _header_of_command(command: str) -> AudioInfo | Unusable:
    """Runs a command, which is the only way to find the length of its output."""
    import soundfile

    try:
        samples, rate = soundfile.read(BytesIO(output_of(command)), dtype="float32", always_2d=True)
    except Exception as error:  # the shell, the program and the decoder may each fail
        return Unusable("unreadable", f"{command!r}: {' '.join(str(error).split())[:200]}")
    if not len(samples):
        return Unusable("empty", f"{command!r} writes no samples")
    return AudioInfo(rate, len(samples), samples.shape[1])


def _header_of_file(path: str) -> tuple[AudioInfo, int]:
    """Returns the header of a file and its size. Raises OSError, ValueError, soundfile.LibsndfileError."""
    check_regular_file(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        info = _plain_header(os.read(descriptor, HEAD_BYTES), status.st_size)
        if info is None:
            os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    if info is not None:
        os.close(descriptor)
    else:
        with open_descriptor(descriptor) as file:
            info = _info_of(file)
    return info._replace(version=FileVersion.of(status)), status.st_size


def _header_of_member(member: Member) -> tuple[AudioInfo, int]:
    """Returns the header of a member and its size. Raises the errors of `_header_of_file`, and those of reading it."""
    if info := _plain_header(member.content.head(), member.length):
        return info, member.length
    with member.content.open() as stream:
        guarded = GuardedStream(stream)
        try:
            with open_stream(guarded) as file:
                return _info_of(file), member.length
        finally:
            guarded.check()


def _plain_header(head: bytes, size: int) -> AudioInfo | None:
    """Parses the start of a file of `size` bytes; returns None if libsndfile has to read the header."""
    if found := flac.parse_header(head):
        return AudioInfo(found.rate, found.num_samples, found.num_channels)
    if plain := wav.parse_header(head, size):
        return AudioInfo(plain.rate, plain.num_samples, plain.num_channels)
    return None


def _info_of(file: "soundfile.SoundFile") -> AudioInfo:
    return AudioInfo(file.samplerate, file.frames, file.channels, _ends_early(file))


def _ends_early(file: "soundfile.SoundFile") -> bool:
    """Returns whether a file holds fewer bytes than its header says, and was not written to a pipe."""
    if file.format not in _FORMATS_WITH_BYTE_COUNT and file.format != "RF64":
        return False
    log = file.extra_info
    blocks = _BLOCK_BYTES.search(log)
    block_bytes = max(1, int(blocks[1])) if blocks else 1
    if file.format == "RF64":
        match = _RF64_BYTES.search(log)
        return match is not None and file.frames < int(match[1]) // block_bytes
    match = _ENDS_EARLY.search(log)
    if match is None or int(match[1]) <= int(match[2]):
        return False
    return int(match[1]) not in {*_STREAMED_BYTES, _STREAMED_BLOCKS // block_bytes * block_bytes}


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
    if found := _header_of_other_format(encoded):
        if isinstance(audio, Member):
            return found, audio.length
        status = os.stat(audio.location)
        return found._replace(version=FileVersion.of(status)), status.st_size
    # libsndfile's own message: soundfile adds the file descriptor, which differs between processes.
    detail = " ".join(getattr(error, "error_string", str(error)).split()).rstrip(".")
    return Unusable("unreadable", f"{audio}: {detail}{encoded.advice()}")


def _header_of_other_format(audio: EncodedAudio) -> AudioInfo | None:
    """Reads the header of a format that libsndfile does not know, such as M4A, with Lhotse's decoders."""
    with audio.as_file() as path:
        found = header_of_other_format(path)
    return found and AudioInfo(*found)
