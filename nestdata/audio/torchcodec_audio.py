"""Formats that libsndfile does not know, such as M4A, WMA and WebM, decoded by FFmpeg through the package torchcodec.

The length that a container gives is often rounded or estimated, or missing, so the decoded samples are counted. The
program `ffmpeg` writes equally many, with two exceptions. Of WMA, torchcodec leaves out the last block, of up to 64 ms.
In containers with rounded time stamps, audio that is decoded in several blocks may lose up to 0.2 s where a block ends.

The time stamps of AAC, ALAC, FLAC, MP3 and PCM in MP4 and its relatives count samples. A window of such a file is
therefore decoded alone, and has the same samples as after decoding from the start. There is one exception: where an
encoder of AAC, such as FFmpeg's, has left out noise, the decoder draws other noise.

torchcodec, which imports torch, is imported when a file needs it.
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.reader import AudioReader

# Samples of all channels that are decoded at a time, in 512 MiB. torchcodec decodes a file from its start again for
# each block, because it can only go on behind a time stamp, which is rounded in some formats.
_BLOCK_SAMPLES = 1 << 27
# In seconds, before every time stamp: samples that an encoder adds before the audio have negative ones.
_BEFORE_START = -1e18
# Bytes 4 to 8 of MP4, M4A, MOV and 3GP (ISO/IEC 14496-12).
_MP4 = b"ftyp"
# Codecs whose time stamps in MP4 count samples. Those of Opus skip samples at the start.
_COUNTED_CODECS = ("aac", "alac", "flac", "mp3", "pcm_")
# Seconds that are decoded before a window, for decoders that depend on what they have decoded, and behind it.
_MARGIN_S = 0.5


class TorchcodecAudio(AudioReader):
    """An audio file that FFmpeg decodes."""

    def __init__(self, source: str | bytes, min_seconds: float = 0.0) -> None:
        """Reads the header.

        Args:
            source: The absolute path of a file, or its bytes.
            min_seconds: Position in seconds up to which the file will be read; 0 if it is not known.

        Raises:
            RuntimeError, ValueError: FFmpeg finds no audio in it.
        """
        self._source = source
        self._min_seconds = min_seconds
        self._unused: Any = None
        decoder = self._unused = self._decoder()
        self.rate = int(decoder.metadata.sample_rate)
        self.num_channels = int(decoder.metadata.num_channels)
        # The time stamp of the first sample in seconds, if all other time stamps follow from it.
        self._first_stamp: float | None = None
        if str(decoder.metadata.codec).startswith(_COUNTED_CODECS) and _is_mp4(source):
            self._first_stamp = float(decoder.metadata.begin_stream_seconds_from_header or 0)
        self._window_start = 0
        self._ahead: Iterator[NDArray[np.float32]] | None = None
        self._rest = np.empty((0, self.num_channels), np.float32)

    def close(self) -> None:
        """Frees the decoder."""
        self._ahead = self._unused = None

    def seek(self, position: int) -> None:
        """Moves from the start to a position in samples, or to the end if that comes first."""
        if self._first_stamp is None:
            self.skip(position)
        else:
            self._window_start = position

    def read(self, num_samples: int) -> NDArray[np.float32]:
        """Returns the next samples; fewer at the end."""
        if self._ahead is None:
            self._ahead = self._blocks()
        found = []
        while num_samples > 0:
            if not len(self._rest):
                self._rest = next(self._ahead, self._rest)
                if not len(self._rest):
                    break
            found.append(self._rest[:num_samples])
            self._rest = self._rest[num_samples:]
            num_samples -= len(found[-1])
        return found[0] if len(found) == 1 else np.concatenate(found) if found else self._rest[:0]

    def _decoder(self) -> Any:
        """Returns a decoder that has decoded nothing yet: first the one that has read the header, then new ones."""
        from torchcodec.decoders import AudioDecoder

        decoder, self._unused = self._unused, None
        return decoder or AudioDecoder(self._source)

    def _blocks(self) -> Iterator[NDArray[np.float32]]:
        seconds = max(1, _BLOCK_SAMPLES // (self.rate * self.num_channels))
        start, stop, num_ahead = _BEFORE_START, float(seconds), 0
        if self._first_stamp is not None:
            num_ahead = min(self._window_start, round(_MARGIN_S * self.rate))
            before_s = (self._window_start - num_ahead) / self.rate
            if before_s:
                start = self._first_stamp + before_s
            stop = self._first_stamp + (self._min_seconds or before_s + seconds) + _MARGIN_S
        while len(found := self._played(start, stop)):
            yield found[num_ahead:]
            num_ahead = 0
            start, stop = stop, stop + seconds
        # Time stamps may begin late, or jump.
        if len(found := self._played(start, None)):
            yield found

    def _played(self, start: float, stop: float | None) -> NDArray[np.float32]:
        """Returns the samples whose time stamps are in a range, shape (num_samples, num_channels)."""
        # A decoder that was used before finds nothing in containers whose time stamps are rounded, such as Matroska.
        decoder = self._decoder()
        try:
            samples = decoder.get_samples_played_in_range(start, stop)
        except RuntimeError as error:
            if "No audio frames were decoded" not in str(error):
                raise
            return np.empty((0, self.num_channels), np.float32)
        return np.ascontiguousarray(samples.data.numpy().T)


def _is_mp4(source: str | bytes) -> bool:
    if isinstance(source, bytes):
        return source[4:8] == _MP4
    with open(source, "rb") as file:
        return file.read(8)[4:] == _MP4


def has_no_sound(source: str | bytes) -> bool:
    """Returns whether FFmpeg reads a file, given by its absolute path or its bytes, and finds no audio in it."""
    from torchcodec.decoders import VideoDecoder

    try:
        VideoDecoder(source)
        TorchcodecAudio(source)
    except Exception as error:  # torchcodec raises errors of many types
        return "audio stream" in str(error)
    return False


@cache
def problem() -> str:
    """Returns why torchcodec cannot be used, and what to do about it; empty if it can."""
    if find_spec("torchcodec") is None:
        return "install torchcodec and FFmpeg's libraries, which decode it"
    try:
        import torchcodec.decoders  # noqa: F401
    except Exception:  # it raises errors of several types if FFmpeg's libraries are not found
        return "torchcodec is installed, but FFmpeg's libraries are not: install them (apt install ffmpeg)"
    return ""
