"""Reads the headers of audio files: sampling rate, length and channels, or why the audio cannot be used.

The headers of plain FLAC and WAV files are parsed here, in a twentieth of libsndfile's time. Everything else is left to
libsndfile, which decides whether it can be used, and to the decoders of `nestdata.corpus.lhotse_audio`.
"""

import os
import re
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from nestdata.corpus import flac, wav
from nestdata.corpus.encoded import EncodedAudio, open_descriptor, open_stream
from nestdata.corpus.file_kind import check_regular_file, special_file_kind
from nestdata.corpus.lhotse_audio import header_of_other_format
from nestdata.corpus.members import describe
from nestdata.corpus.sources import output_of
from nestdata.prepare.inputs.content import HEAD_BYTES, GuardedStream
from nestdata.prepare.inputs.entry import Member, Problem
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


def read_header(path: str, member: Member | None) -> AudioInfo | Problem:
    """Reads the header of an audio file, or of a member.

    Raises:
        StorageError: The member cannot be read.
    """
    import soundfile

    try:
        info, status = _header_of_file(path) if member is None else (_header_of_member(member), None)
    except (soundfile.LibsndfileError, OSError, ValueError) as error:
        found = _header_after(error, path, member)
        if isinstance(found, Problem):
            return found
        info, status = found, os.stat(path) if member is None else None
    size = member.length if member else status.st_size if status else 0
    if info.num_frames >= _UNKNOWN_LENGTH:
        detail = f"{name_of(path, member)}: its header does not give the number of samples; re-encode it"
        return Problem("unknown_length", detail)
    if info.num_frames > _MAX_SAMPLES_PER_BYTE * size:
        detail = f"{name_of(path, member)}: its header gives {info.num_frames} samples, too many for {size} bytes"
        return Problem("truncated", detail)
    if info.num_frames <= 0:
        return Problem("empty", f"{name_of(path, member)} holds no samples")
    return info if status is None else info._replace(version=FileVersion.of(status))


def header_of_command(command: str) -> AudioInfo | Problem:
    """Runs a command, which is the only way to find the length of its output."""
    import soundfile

    try:
        samples, rate = soundfile.read(BytesIO(output_of(command)), dtype="float32", always_2d=True)
    except Exception as error:  # the shell, the program and the decoder may each fail
        return Problem("unreadable", f"{command!r}: {' '.join(str(error).split())[:200]}")
    if not len(samples):
        return Problem("empty", f"{command!r} writes no samples")
    return AudioInfo(rate, len(samples), samples.shape[1])


def name_of(path: str, member: Member | None) -> str:
    """Returns a name of the audio for messages."""
    return path if member is None else describe(member.shard.location, member.offset, member.length)


def _header_of_file(path: str) -> tuple[AudioInfo, os.stat_result]:
    """Returns the header of a file and its status. Raises OSError, ValueError, soundfile.LibsndfileError."""
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
        return info, status
    with open_descriptor(descriptor) as file:
        return _info_of(file), status


def _header_of_member(member: Member) -> AudioInfo:
    """Raises the errors of `_header_of_file`, and those of reading the member."""
    if info := _plain_header(member.content.head(), member.length):
        return info
    with member.content.open() as stream:
        guarded = GuardedStream(stream)
        try:
            with open_stream(guarded) as file:
                return _info_of(file)
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


def _header_after(error: Exception, path: str, member: Member | None) -> AudioInfo | Problem:
    """Returns why libsndfile could not read a header, or the header that another decoder found.

    The causes are examined only after a failure, because most files are valid and every call costs time.
    """
    name = name_of(path, member)
    if member is None:
        if kind := special_file_kind(path):
            return Problem("not_a_file", f"{path} is {kind}")
        if isinstance(error, PermissionError):
            return Problem("unreadable", f"{path} cannot be opened ({error.strerror}); grant read permission")
        if not os.path.isfile(path):
            return Problem("missing", f"{path} does not exist")
    audio = EncodedAudio(name, member.content.read() if member else None)
    if not audio.size():
        return Problem("empty", f"{name} has no bytes")
    if found := _header_of_other_format(audio):
        return found
    # libsndfile's own message: soundfile adds the file descriptor, which differs between processes.
    detail = " ".join(getattr(error, "error_string", str(error)).split()).rstrip(".")
    return Problem("unreadable", f"{name}: {detail}{audio.advice()}")


def _header_of_other_format(audio: EncodedAudio) -> AudioInfo | None:
    """Reads the header of a format that libsndfile does not know, such as M4A, with Lhotse's decoders."""
    with audio.as_file() as path:
        found = header_of_other_format(path)
    return found and AudioInfo(*found)
