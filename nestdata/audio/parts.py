"""Reads streams with libsndfile, and several streams of a file as one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.byte_ranges import ByteRanges, Piece, SplicedStream
from nestdata.audio.reader import AudioReader, MixedStreamsError

# What libsndfile reports as the number of samples if only decoding can find it.
_UNKNOWN_LENGTH = (1 << 63) - 1
# Samples of MPEG that are decoded before a start inside a stream, because a frame may use bits of earlier frames. They
# are 16 frames of MPEG-1 or 32 frames of MPEG-2; with the shortest frames, 9 or 24 are needed.
_PREROLL = 18432


class SoundFileAudio(AudioReader):
    """A stream that libsndfile decodes.

    Samples are read by libsndfile's own function, because soundfile seeks after each read. In FLAC, it would also drop
    the samples before damage, and the samples before other bytes behind the last frame.
    """

    def __init__(self, stream: Any) -> None:
        """Opens a seekable stream, or a descriptor, which is closed at the end.

        Raises:
            soundfile.LibsndfileError: The stream has no audio format that libsndfile reads.
        """
        import soundfile

        self._library: Any = soundfile
        self._file = soundfile.SoundFile(stream)
        self.rate, self.num_channels = self._file.samplerate, self._file.channels
        self.num_samples = None if self._file.frames == _UNKNOWN_LENGTH else self._file.frames
        self.format: str = self._file.format
        self._has_read = False

    def close(self) -> None:
        """Closes the stream."""
        self._file.close()

    def seek(self, position: int) -> None:
        """Moves from the start to a position in samples. In MPEG, first decodes some samples before it."""
        if self.num_samples is not None:
            position = min(position, self.num_samples)
        start = max(0, position - _PREROLL) if self.format == "MP3" else position
        self._file.seek(start)
        self.skip(position - start)

    def read(self, num_samples: int) -> NDArray[np.float32]:
        """Returns the next samples. In FLAC, they end before damage, whose error `damage` then holds."""
        if self.num_samples is not None:
            num_samples = min(num_samples, self.num_samples)
        out = np.empty((num_samples, self.num_channels), np.float32)
        return out[: self.read_into(out)]

    def read_into(self, out: NDArray[np.float32]) -> int:
        """Fills an array, shape (num_samples,) for one channel, or (num_samples, num_channels)."""
        samples = self._library._ffi.from_buffer("float[]", out)  # noqa: SLF001
        count = int(self._library._snd.sf_readf_float(self._file._file, samples, len(out)))  # noqa: SLF001
        try:
            self._library._error_check(self._file._errorcode)  # noqa: SLF001
        except self._library.LibsndfileError as error:
            if self.format != "FLAC" or not (count or self._has_read):
                raise
            self.damage = error
        self._has_read = True
        return count


class AudioPart(NamedTuple):
    """One stream of a file."""

    ranges: ByteRanges
    """The bytes of the file."""

    pieces: Sequence[Piece]
    """The pieces of these bytes that make up the stream."""

    num_samples: int | None = None
    """Samples of each channel, if they were counted; None if the decoder knows the number."""

    claimed_size: int = 0
    """Size that makes an estimate of libsndfile longer than the stream; see `SplicedStream`."""

    is_clean: bool = True
    """Whether the decoder knows the length and can seek; if not, the part is decoded from its start."""


class JoinedAudio(AudioReader):
    """Reads the streams of a file as if they were one."""

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
        self.rate, self.num_channels = self._file.rate, self._file.num_channels

    def close(self) -> None:
        """Closes the stream that is open."""
        self._file.close()

    def count(self) -> int:
        """Counts the samples of each channel, from the start; decodes streams of unknown length for that.

        Raises:
            MixedStreamsError: The streams have different rates or numbers of channels.
            soundfile.LibsndfileError: A stream cannot be decoded.
        """
        total = 0
        while True:
            total += self._file.skip() if self._left is None else self._left
            if not self._open_next():
                return total

    def seek(self, position: int) -> None:
        """Moves from the start to a position in samples, or to the end if that comes first."""
        while self._left is not None and position >= self._left:
            position -= self._left
            if not self._open_next():
                return
        if self._left is None:
            self.skip(position)
        else:
            self._file.seek(position)
            self._left -= position

    def read(self, num_samples: int) -> NDArray[np.float32]:
        """Returns the next samples; fewer at the end of the last stream."""
        found: list[NDArray[np.float32]] = []
        while num_samples > 0:
            wanted = num_samples if self._left is None else min(num_samples, self._left)
            samples = self._file.read(wanted)
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
        return np.concatenate(found) if found else np.empty((0, self.num_channels), np.float32)

    def _open_next(self) -> bool:
        """Opens the next stream; returns False, and keeps the last one open, if there is none."""
        if self._index + 1 >= len(self._parts):
            return False
        self._file.close()
        self._file = self._open(self._index + 1)
        if (self._file.rate, self._file.num_channels) != (self.rate, self.num_channels):
            raise MixedStreamsError(
                f"stream {self._index + 1} of the file has {self._file.rate} Hz and {self._file.num_channels} "
                f"channels, the first one {self.rate} Hz and {self.num_channels}: divide the file"
            )
        return True

    def _open(self, index: int) -> SoundFileAudio:
        part = self._parts[index]
        file = SoundFileAudio(SplicedStream(part.ranges, part.pieces, part.claimed_size))
        num_samples = file.num_samples if part.num_samples is None else part.num_samples
        self._index = index
        self._left = num_samples if part.is_clean else None
        return file
