"""Encoded audio, in a file or in memory, as the decoders take it.

libsndfile and dr_flac read bytes in memory to the same samples as a file of the same bytes. Other decoders choose by
the suffix of a file, so they get a temporary file.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple

from nestdata.audio import flac
from nestdata.audio.file_kind import check_regular_file, special_file_kind
from nestdata.audio.wav import open_wav, parse_wav
from nestdata.errors import AudioReason, StorageError

# First bytes of formats that decoders tell by the suffix of a file.
_SUFFIXES = {b"NIST_1A": ".sph", b"fLaC": ".flac", b"RIFF": ".wav", b"ID3": ".mp3", b"0&\xb2u\x8ef\xcf\x11": ".wma"}

# What to do about formats that libsndfile does not know, by their suffix. Programs that decode them are not started.
_ADVICE = {
    ".sph": "SPHERE files are read if they are not compressed: convert this one, for example with sph2pipe",
    ".m4a": "install torchcodec, which decodes M4A, or convert the file to FLAC",
    ".wma": "install torchcodec, which decodes WMA, or convert the file to FLAC",
}


class EncodedAudio(NamedTuple):
    """An audio file, or its bytes in memory."""

    path: str
    """Path of the file; with `content`, only a name for messages."""

    content: bytes | None = None
    """The bytes of the file if they have been read; the file is then not opened."""

    def open(self) -> Any:
        """Opens the audio as a `soundfile.SoundFile` or a `PlainWav`, for a `with` statement.

        Errors are those of `open_audio`.
        """
        if self.content is not None:
            return parse_wav(self.content) or open_stream(_Bytes(self.content))
        check_regular_file(self.path)
        descriptor = os.open(self.path, os.O_RDONLY)
        return open_wav(descriptor) or open_descriptor(descriptor)

    def read_flac(self) -> flac.FlacFile | None:
        """Returns the audio as a FLAC file that dr_flac can decode; None if libsndfile has to decode it."""
        return flac.read_flac(self.path) if self.content is None else flac.parse_flac(self.content)

    def size(self) -> int:
        """Returns the number of bytes.

        Raises:
            OSError: The file does not exist.
        """
        return os.path.getsize(self.path) if self.content is None else len(self.content)

    @contextmanager
    def as_file(self) -> Iterator[str]:
        """Yields the absolute path of a file with this content, a temporary one if it is in memory.

        Decoders take a relative name such as `http:a.m4a` for a protocol and its argument.

        Raises:
            OSError: The path is a directory, pipe, socket or device.
            StorageError: The temporary file cannot be written.
        """
        if self.content is None:
            check_regular_file(self.path)
            yield os.path.abspath(self.path)
            return
        with tempfile.TemporaryDirectory(prefix="nestdata-") as folder:
            path = os.path.join(folder, f"audio{_suffix_of(self.content)}")
            try:
                with open(path, "wb") as file:
                    file.write(self.content)
            except OSError as error:
                # Not a property of the audio: a cut must not be replaced because a disk is full.
                raise StorageError.because(
                    "unavailable",
                    f"{path}: cannot be written ({error.strerror}); {self.path} is decoded from a temporary file. Free "
                    "space there, or set TMPDIR.",
                ) from error
            yield path

    def advice(self) -> str:
        """Returns what to do about a format that cannot be read, as the end of a message; empty if nothing is known."""
        try:
            if self.content is not None:
                head = self.content[:64]
            else:
                check_regular_file(self.path)
                with open(self.path, "rb") as file:
                    head = file.read(64)
        except OSError:
            return ""
        advice = _ADVICE.get(_suffix_of(head))
        return f"; {advice}" if advice else ""

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
                if file.frames == 0:
                    return "empty"
                try:
                    file.seek(file.frames - 1)
                    return "unreadable" if len(file.read(1)) else "truncated"
                except soundfile.LibsndfileError:
                    return "truncated"  # the header is valid, but the end that it describes is missing
        except (soundfile.LibsndfileError, OSError):
            return "unreadable"


class _Bytes(BytesIO):
    """Bytes in memory. A position before the start, which damaged headers ask for, is the start.

    libsndfile cannot be told of an exception, which would be printed.
    """

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return super().seek(max(0, offset) if whence == 0 else offset, whence)


def open_audio(path: str) -> Any:
    """Opens an audio file as a `soundfile.SoundFile` for one sequential read from any position.

    Raises:
        OSError: The file cannot be opened, or it is a directory, pipe, socket or device, which is never opened.
        soundfile.LibsndfileError: The file has no audio format that libsndfile reads.
    """
    check_regular_file(path)
    # Opened by descriptor, because soundfile's checks of a file name take 3 % of the time to read a short file.
    return open_descriptor(os.open(path, os.O_RDONLY))


def open_descriptor(descriptor: int) -> Any:
    """Opens a file at its start, as `open_audio` does; closes the descriptor in any case.

    Raises:
        soundfile.LibsndfileError: The file has no audio format that libsndfile reads.
    """
    # libsndfile closes the descriptor, even if it does not know the format.
    return _sound_file_class()(descriptor)


def open_stream(stream: Any) -> Any:
    """Opens a seekable stream of bytes as a `soundfile.SoundFile` for one sequential read from any position.

    Raises:
        soundfile.LibsndfileError: The stream has no audio format that libsndfile reads.
    """
    return _sound_file_class()(stream)


@cache
def _sound_file_class() -> Any:
    import soundfile

    class SequentialSoundFile(soundfile.SoundFile):  # type: ignore[misc]  # soundfile has no annotations
        """A file that is read once; reported as not seekable, so that soundfile does not seek after each read."""

        def seekable(self) -> bool:
            return False

    return SequentialSoundFile


def _suffix_of(content: bytes) -> str:
    """Returns the usual suffix of the format of an audio file; empty if it is not known."""
    if content[4:8] == b"ftyp":
        return ".m4a"
    if content.startswith(b"OggS"):
        return ".opus" if content[28:36] == b"OpusHead" else ".ogg"
    return next((suffix for start, suffix in _SUFFIXES.items() if content.startswith(start)), "")
