"""Streams that libsndfile decodes, and several of them in a file, one after the other as if they were one stream."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.byte_ranges import ByteRanges, Piece, SplicedStream

UNKNOWN_LENGTH = (1 << 63) - 1
"""Number of samples that libsndfile reports, and `JoinedAudio`, if it is not known without decoding."""

# Samples of MPEG to decode before a start inside a stream, so that all bits that the frame there borrows from earlier
# ones are known: 16 frames of MPEG-1 and 32 of MPEG-2, of which the shortest need 9 and 24.
_PREROLL = 18432
# Samples of all channels that are decoded at a time to count or skip them, in 4 MiB.
_BLOCK_SAMPLES = 1 << 20


class MixedStreamsError(ValueError):
    """A file is several streams of different rates, numbers of channels or layers."""


class AudioPart(NamedTuple):
    """One stream of a file."""

    ranges: ByteRanges
    """The bytes of the file."""

    pieces: Sequence[Piece]
    """Those of the stream."""

    num_samples: int | None = None
    """Samples of each channel, if they were counted; None if the decoder knows the number."""

    claimed_size: int = 0
    """Size that makes an estimate of libsndfile longer than the stream; see `SplicedStream`."""

    is_clean: bool = True
    """Whether the decoder knows the length and seeks; if not, the part is decoded from its start."""


class JoinedAudio:
    """The streams of a file, with the part of the interface of `soundfile.SoundFile` that decoding uses."""

    frames = UNKNOWN_LENGTH
    close_source: Callable[[], None] | None = None
    """Closes the file that the streams are in; called once at the end."""

    def __init__(self, parts: Sequence[AudioPart], *, ends_early: bool = False) -> None:
        """Opens the first stream.

        Args:
            parts: The streams, in order.
            ends_early: Whether the file is shorter than its own header says.

        Raises:
            soundfile.LibsndfileError: libsndfile does not read it.
        """
        self.ends_early = ends_early
        self._parts = parts
        self._index = 0
        self._left: int | None = None
        self._file = self._open(0)
        self.samplerate: int = self._file.samplerate
        self.channels: int = self._file.channels
        self.subtype: str = self._file.subtype
        self.format: str = self._file.format

    def __enter__(self) -> "JoinedAudio":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the stream that is open, and the file."""
        self._file.close()
        if self.close_source:
            self.close_source()
            self.close_source = None

    def count(self) -> int:
        """Returns the number of samples of each channel from the start, and decodes those that nothing else gives.

        Raises:
            MixedStreamsError: The streams have different rates or numbers of channels.
            soundfile.LibsndfileError: A stream cannot be decoded.
        """
        total = 0
        while True:
            total += count_samples(self._file) if self._left is None else self._left
            if not self._open_next():
                return total

    def seek(self, position: int) -> int:
        """Moves from the start to a position in samples, or to the end if that comes first."""
        num_ahead = position
        while self._left is not None and num_ahead >= self._left:
            num_ahead -= self._left
            if not self._open_next():
                return position - num_ahead
        if self._left is not None:
            self._file.seek(num_ahead)
            self._left -= num_ahead
            return position
        return position - num_ahead + skip_samples(self, num_ahead)

    def read(self, num_samples: int, dtype: str = "float32", always_2d: bool = True) -> NDArray[Any]:
        """Returns the next samples, shape (num_samples, num_channels); fewer at the end of the last stream.

        Args:
            num_samples: Number of samples of each channel.
            dtype: "float32".
            always_2d: Without effect.
        """
        del always_2d
        found: list[NDArray[Any]] = []
        while num_samples > 0:
            wanted = num_samples if self._left is None else min(num_samples, self._left)
            samples = self._file.read(wanted, dtype=dtype, always_2d=True)
            found.append(samples)
            num_samples -= len(samples)
            if self._left is not None:
                if len(samples) < wanted:
                    raise ValueError(f"a stream of the file ends {wanted - len(samples)} samples before its own length")
                self._left -= wanted
            if num_samples > 0 and not self._open_next():
                break
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty((0, self.channels), dtype)

    def _open_next(self) -> bool:
        """Opens the next stream; returns False, and keeps the last one open, if there is none."""
        if self._index + 1 >= len(self._parts):
            return False
        self._file.close()
        self._file = self._open(self._index + 1)
        if (self._file.samplerate, self._file.channels) != (self.samplerate, self.channels):
            raise MixedStreamsError(
                f"stream {self._index + 1} of the file has {self._file.samplerate} Hz and {self._file.channels} "
                f"channels, the first one {self.samplerate} Hz and {self.channels}: divide the file"
            )
        return True

    def _open(self, index: int) -> Any:
        part = self._parts[index]
        file = open_stream(SplicedStream(part.ranges, part.pieces, part.claimed_size))
        num_samples = file.frames if part.num_samples is None else part.num_samples
        self._index = index
        self._left = num_samples if part.is_clean and num_samples != UNKNOWN_LENGTH else None
        return file


def count_samples(file: Any) -> int:
    """Returns the number of samples of each channel of an open file, by decoding it to the end."""
    return skip_samples(file, UNKNOWN_LENGTH)


def skip_samples(file: Any, num_samples: int) -> int:
    """Decodes the next samples of an open file without keeping them, and returns their number, fewer at the end."""
    num_ahead, block = num_samples, max(1, _BLOCK_SAMPLES // file.channels)
    while num_ahead and (num_found := len(file.read(min(num_ahead, block), dtype="float32", always_2d=True))):
        num_ahead -= num_found
    return num_samples - num_ahead


def open_stream(stream: Any) -> Any:
    """Opens a seekable stream or a descriptor as a `soundfile.SoundFile`, for one sequential read from any position.

    Raises:
        soundfile.LibsndfileError: The stream has no audio format that libsndfile reads.
    """
    return _sound_file_class()(stream)


@cache
def _sound_file_class() -> Any:
    import soundfile

    class SequentialSoundFile(soundfile.SoundFile):  # type: ignore[misc]  # soundfile has no annotations
        """A file that is read once; reported as not seekable, so that soundfile does not seek after each read."""

        ends_early = False
        """Whether the file is shorter than its own header says."""

        damage: Exception | None = None
        """Why there are no more samples, if this is not the end of the file."""

        _has_read = False

        def seekable(self) -> bool:
            return False

        def seek(self, frames: int, whence: int = 0) -> int:
            """Moves from the start; in MPEG, as far as needed before the position, and decodes up to it."""
            if self.format != "MP3":
                return int(super().seek(frames, whence))
            start = max(0, frames - _PREROLL)
            super().seek(start, whence)
            self.read(frames - start, dtype="float32", always_2d=True)
            return frames

        def _cdata_io(self, action: str, data: Any, ctype: str, frames: int) -> int:
            """Reads samples; in FLAC, up to damage or to what is behind the last frame.

            libsndfile returns them with an error, for which soundfile drops them.
            """
            if action != "read" or self.format != "FLAC":
                return int(super()._cdata_io(action, data, ctype, frames))
            count = int(getattr(soundfile._snd, f"sf_readf_{ctype}")(self._file, data, frames))  # noqa: SLF001
            if count < frames:
                try:
                    soundfile._error_check(self._errorcode)  # noqa: SLF001
                except soundfile.LibsndfileError as error:
                    if not (count or self._has_read):
                        raise
                    self.damage = error
            self._has_read = True
            return count

    return SequentialSoundFile
