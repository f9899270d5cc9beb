"""Decodes the beginning of a span of audio for the report, measures its level, and writes it to a small file.

The audio keeps the sampling rate of its file, so that neither torch nor Lhotse is imported. soundfile is imported when
the first file is opened.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.byte_ranges import StreamRanges
from nestdata.audio.decoder_messages import named_messages
from nestdata.audio.encoded import EncodedAudio, open_ranges, open_stream
from nestdata.audio.file_kind import special_file_kind
from nestdata.errors import AudioError, StorageError
from nestdata.prepare.inputs.content import GuardedStream, StoredContent
from nestdata.prepare.writing.found import AudioSpan
from nestdata.storage import is_url

MAX_SECONDS = 10.0
"""Longest part of a cut that is measured or copied."""

# libsndfile and browsers know no FLAC files of higher rates.
_MAX_RATE = 192_000
_MAX_CHANNELS = 64
# Full scale, less the rounding of 16-bit samples and of lossy formats.
_FULL_SCALE = 0.999
# Samples in a row at full scale: fewer may be a peak that just fits.
_MIN_CLIPPED = 3


class Levels(NamedTuple):
    """Levels of the beginning of a cut."""

    rms_db: float
    """Mean power in dB of full scale, that of a square wave; minus infinity for digital silence."""

    peak_db: float
    """Largest amplitude in dB of full scale."""

    clipped: float
    """Share of the samples that are in runs of at least three samples at full scale."""


class Sound(NamedTuple):
    """The beginning of a span of audio."""

    samples: NDArray[np.float32]
    """Shape (num_samples,)."""

    rate: int
    """In Hz."""


def read_sound(span: AudioSpan) -> Sound:
    """Decodes up to `MAX_SECONDS` of a span, at the rate of its file.

    Raises:
        AudioError: There is no such file, or no decoder reads it. The message does not name the file.
        StorageError, OSError: The bytes cannot be read.
    """
    try:
        with _opened(span) as file, named_messages(span.location, file.format):
            rate, num_channels = int(file.samplerate), int(file.channels)
            _check_layout(span, rate, num_channels)
            start = round(span.start * rate)
            seconds = MAX_SECONDS if span.duration is None else min(span.duration, MAX_SECONDS)
            num_samples = min(round(seconds * rate), file.frames - start)
            if start:
                file.seek(min(start, file.frames))
            samples = file.read(max(0, num_samples), dtype="float32", always_2d=True)
    except (AudioError, StorageError, OSError):
        raise
    except Exception as error:  # decoders raise many types
        # libsndfile's own message: soundfile adds the file descriptor, which differs between processes.
        detail = " ".join(getattr(error, "error_string", str(error)).split())[:200]
        raise AudioError(detail) from error
    if not len(samples):
        raise AudioError("no samples")
    with np.errstate(over="ignore", invalid="ignore"):  # samples of floating point may be huge, or not finite
        selected = samples.mean(axis=1) if span.channel is None else samples[:, span.channel]
    return Sound(np.ascontiguousarray(selected, np.float32), rate)


def measure(samples: NDArray[np.float32]) -> Levels:
    """Returns the levels of samples, shape (num_samples,); those that are not finite count as zeros."""
    amplitudes = np.abs(np.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0))
    power = float(np.mean(np.square(amplitudes, dtype=np.float64)))
    with np.errstate(divide="ignore"):
        rms_db, peak_db = 10 * np.log10(power), 20 * np.log10(float(amplitudes.max()))
    return Levels(float(rms_db), float(peak_db), _clipped_share(amplitudes >= _FULL_SCALE))


def write_sound(path: Path, sound: Sound) -> int:
    """Writes a FLAC file of 16 bits, with amplitudes outside of [-1, 1] clipped, and returns its number of bytes.

    Raises:
        AudioError: There is no FLAC of this sampling rate.
        OSError: The file cannot be written.
    """
    import soundfile

    scaled = np.rint(np.clip(np.nan_to_num(sound.samples, nan=0.0, posinf=0.0, neginf=0.0), -2, 2) * 32768)
    samples = np.clip(scaled, -32768, 32767).astype(np.int16)
    # To memory, because libsndfile waits until a file is on disk (fsync), which takes longer than everything else.
    encoded = BytesIO()
    try:
        soundfile.write(encoded, samples, sound.rate, format="FLAC", subtype="PCM_16", compression_level=0.0)
    except soundfile.LibsndfileError as error:  # above 65535 Hz, some rates cannot be written
        raise AudioError(f"FLAC cannot be written at {sound.rate} Hz") from error
    return path.write_bytes(encoded.getbuffer())


@contextmanager
def _opened(span: AudioSpan) -> Iterator[Any]:
    end = span.start + (span.duration or 0.0)
    if span.extent is None and not is_url(span.location):
        if kind := special_file_kind(span.location):
            raise AudioError(f"it is {kind}")
        if not Path(span.location).is_file():
            raise AudioError("no such file")
        with EncodedAudio(span.location).open(end) as file:
            yield file
        return
    if span.extent is None:
        raise AudioError("no such object")
    offset, length, size, etag = span.extent
    with StoredContent(span.location, offset, length, etag, size).open() as stream:
        guarded = GuardedStream(stream)
        try:
            ranges = StreamRanges(guarded, length)
            with open_ranges(ranges, lambda: _open_from_start(guarded), span.location, end) as file:
                yield file
        finally:
            guarded.check()


def _open_from_start(stream: GuardedStream) -> Any:
    stream.seek(0)
    return open_stream(stream)


def _check_layout(span: AudioSpan, rate: int, num_channels: int) -> None:
    """Refuses layouts that damaged headers claim, which would need much memory, and a channel that is not there."""
    if rate > _MAX_RATE or num_channels > _MAX_CHANNELS:
        raise AudioError(f"{num_channels} channels at {rate} Hz are not played here")
    if span.channel is not None and span.channel >= num_channels:
        raise AudioError(f"it has {num_channels} channels, and no channel {span.channel}")


def _clipped_share(is_full: NDArray[np.bool_]) -> float:
    if np.count_nonzero(is_full) < _MIN_CLIPPED:  # as in most audio
        return 0.0
    starts_run = np.lib.stride_tricks.sliding_window_view(is_full, _MIN_CLIPPED).all(axis=1)
    in_run = np.convolve(starts_run, np.ones(_MIN_CLIPPED, np.int64)) > 0
    return float(in_run.mean())
