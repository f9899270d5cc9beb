"""Encodes the samples of a cut as a FLAC or WAV file, and counts what is not kept exactly."""

from io import BytesIO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.corpus.corpora import Corpora
from nestdata.pack.config import PackCodec

SUFFIXES: dict[PackCodec, str] = {"flac": ".flac", "pcm": ".wav"}
"""Suffix of the files of each codec."""

_FORMATS: dict[PackCodec, str] = {"flac": "FLAC", "pcm": "WAV"}


class PackedAudio(NamedTuple):
    """The samples of a cut as integers."""

    samples: NDArray[np.int16] | NDArray[np.int32]
    """16-bit integers, or 24-bit integers in the upper bits of 32."""

    is_exact: bool
    """Whether decoding them gives the samples that the corpus gives, bit for bit."""

    scale: float
    """The factor by which the amplitudes were multiplied; 1 unless some were outside of [-1, 1]."""


def load_integers(corpora: Corpora, index: int, bits: int, content: bytes | None = None) -> PackedAudio:
    """Loads a cut as integers.

    Audio that fits into 16 bits is kept as it is. Other audio is rounded to the nearest integers of `bits` bits, so the
    error of an amplitude is at most 2^-bits, and twice that near 1, which the integers do not reach. Nothing else is
    clipped: audio with an amplitude outside of [-1, 1] is multiplied by the factor that brings the largest one to 1.

    Args:
        corpora: The corpora that hold the cut.
        index: Index of the cut.
        bits: Bits per sample, 16 or 24, of audio that does not fit into 16 bits exactly.
        content: The bytes of its audio file, if they have been fetched.

    Raises:
        AudioError: The audio cannot be used.
    """
    _, samples = corpora.load(index, content=content)
    found = _rounded(samples, 16)
    return found if found.is_exact or bits == 16 else _rounded(samples, bits)


def encode(audio: PackedAudio, codec: PackCodec, rate: int) -> bytes:
    """Returns a file of one channel that holds the samples without loss."""
    import soundfile

    subtype = "PCM_16" if audio.samples.dtype == np.int16 else "PCM_24"
    file = BytesIO()
    soundfile.write(file, audio.samples, rate, subtype=subtype, format=_FORMATS[codec])
    return file.getvalue()


def encoder_version() -> str:
    """Returns the library that encodes, with its version. The bytes of a FLAC file depend on it, its samples do not."""
    import soundfile

    return f"libsndfile {soundfile.__libsndfile_version__}"


def _rounded(samples: NDArray[np.float32], bits: int) -> PackedAudio:
    exact = samples.astype(np.float64)
    largest = float(np.abs(exact).max())
    scale = 1.0 if largest <= 1.0 else 1.0 / largest
    full_scale = 1 << (bits - 1)
    # The amplitude 1 itself is one step above the largest integer.
    integers = np.minimum(np.rint(exact * (scale * full_scale)), full_scale - 1).astype(np.int32)
    is_exact = scale == 1.0 and bool(np.array_equal(integers, exact * full_scale))
    if bits == 16:
        return PackedAudio(integers.astype(np.int16), is_exact, scale)
    return PackedAudio(integers << 8, is_exact, scale)
