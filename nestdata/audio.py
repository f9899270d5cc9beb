"""Samples of a cut: decoded by Lhotse, resampled lazily, and checked before anyone learns from them.

Lhotse's own `load_audio` fills up to half a second of missing audio by reflection without a word; here a file that
has become shorter than its cut is an error. Samples are the same bits in every process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lhotse import MonoCut
from lhotse.augmentation import AudioTransform
from numpy.typing import NDArray

from nestdata.errors import AudioError

# Resampling and decoders of lossy formats may be a little off the length in the header.
_LENGTH_TOLERANCE_S = 0.01


def load_samples(cut: MonoCut, *, start: int = 0, num_samples: int | None = None) -> NDArray[np.float32]:
    """Loads a cut, or a part of it, at the sampling rate of the cut.

    Args:
        cut: A cut of one channel; transforms such as resampling are applied.
        start: First sample to read, counted from the start of the cut.
        num_samples: How many to read; all to the end of the cut by default.

    Returns:
        Exactly `num_samples` samples, shape (num_samples,), amplitude as the file has it, usually in [-1, 1].

    Raises:
        AudioError: The file is missing, unreadable, shorter than the cut says, or holds NaN or Inf.
    """
    wanted = cut.num_samples - start if num_samples is None else num_samples
    offset = cut.start + start / cut.sampling_rate
    try:
        samples = _read(cut, offset, wanted / cut.sampling_rate)
    except Exception as error:  # decoders raise what they like, and every one of them means the same here
        detail = " ".join(str(error).split())[:300]
        raise AudioError(
            f"cut {cut.id!r}: cannot read {_place(cut)}: {type(error).__name__}: {detail.rstrip('.')}. "
            "Restore the file, or leave it out and prepare the corpus again."
        ) from error
    missing = wanted - len(samples)
    if missing > _LENGTH_TOLERANCE_S * cut.sampling_rate or not len(samples):
        raise AudioError(
            f"cut {cut.id!r}: {_place(cut)} ends {missing / cut.sampling_rate:.3f} s before the cut does: the file is "
            "truncated, or has changed since the corpus was prepared. Restore it, or prepare the corpus again."
        )
    if not np.isfinite(samples).all():
        raise AudioError(f"cut {cut.id!r}: {_place(cut)} holds NaN or Inf. Convert the file again, or leave it out.")
    return samples[:wanted] if missing <= 0 else np.pad(samples, (0, missing))


def energy(samples: NDArray[np.float32]) -> float:
    """Returns the sum of squares."""
    # Not np.dot, whose sum in float32 depends on the kind of processor.
    return float(np.square(samples, dtype=np.float64).sum())


def _read(cut: MonoCut, offset: float, duration: float) -> NDArray[np.float32]:
    recording = cut.recording
    transforms = [AudioTransform.from_dict(t) if isinstance(t, dict) else t for t in recording.transforms or []]
    for transform in reversed(transforms):
        offset, duration = transform.reverse_timestamps(
            offset=offset, duration=duration, sampling_rate=recording.sampling_rate
        )
    (source,) = [s for s in recording.sources if cut.channel in s.channels]
    # Opus is decoded at the rate it is asked for, which must be the one that the transforms start from.
    source_rate = getattr(transforms[0], "source_sampling_rate", None) if transforms else None
    samples = source.load_audio(offset, duration, force_opus_sampling_rate=source_rate or recording.sampling_rate)
    samples = np.atleast_2d(samples)[[source.channels.index(cut.channel)]]
    if transforms:
        with _one_torch_thread():
            for transform in transforms:
                samples = transform(samples, recording.sampling_rate)
    return np.asarray(samples[0], dtype=np.float32)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Has torch work on one thread, as it does in loader workers: on several, resampling rounds differently."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _place(cut: MonoCut) -> str:
    return str(cut.recording.sources[0].source)
