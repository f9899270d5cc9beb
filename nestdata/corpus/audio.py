"""Samples of a cut: decoded, resampled and checked before anyone learns from them.

What lies in a file that libsndfile reads, as almost everything does, is decoded straight into its place; other sources
and other transforms than resampling go through Lhotse. Lhotse's own `load_audio` fills up to half a second of missing
audio by reflection without a word; here a file that has become shorter than its cut is an error. Samples are the same
bits in every process.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import lru_cache
from typing import Any

import numpy as np
import soundfile
import torch
import torchaudio
from lhotse import MonoCut, Recording
from lhotse.augmentation import AudioTransform
from numpy.typing import NDArray

from nestdata.corpus.file_kind import check_regular_file, special_file_kind
from nestdata.errors import AudioError, AudioReason

SILENCE_DB = -90.0
"""Mean power, in dB of full scale, below which audio counts as silent."""

# Resampling and decoders of lossy formats may be a little off the length in the header.
_LENGTH_TOLERANCE_S = 0.01
# Lhotse reads a recording to its end where a cut lacks no more than a millisecond of all of it; this is beyond both.
_TO_THE_END_S = 0.002


def load_samples(
    cut: MonoCut | Mapping[str, Any],
    *,
    start: int = 0,
    num_samples: int | None = None,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Loads a cut, or a part of it, at the sampling rate of the cut.

    Args:
        cut: A cut of one channel, or the dict that Lhotse writes of it; transforms such as resampling are applied.
        start: First sample to read, counted from the start of the cut.
        num_samples: How many to read; all to the end of the cut by default.
        out: Where the samples go, shape (num_samples,); a new array by default.

    Returns:
        Exactly `num_samples` samples, shape (num_samples,), amplitude as the file has it, usually in [-1, 1].

    Raises:
        AudioError: The file is missing, unreadable, shorter than the cut says, or holds NaN or Inf. What `out` holds
            then is undefined.
    """
    row = cut.to_dict() if isinstance(cut, MonoCut) else cut
    rate = row["recording"]["sampling_rate"]
    whole = samples_in(row["duration"], rate)
    if num_samples is None:
        num_samples = whole - start
    if out is None:
        out = np.empty(num_samples, np.float32)
    seconds = row["duration"] - start / rate if start + num_samples == whole else num_samples / rate
    if start == 0 and math.isclose(seconds, row["recording"]["duration"], abs_tol=1e-3):
        seconds += _TO_THE_END_S
    found = _read(row, row["start"] + start / rate, seconds, out)
    missing = num_samples - found
    if missing > _LENGTH_TOLERANCE_S * rate or not found:
        raise AudioError.because(
            "truncated",
            f"cut {row['id']!r}: {_place(row)} ends {missing / rate:.3f} s before the cut does: the file is "
            "truncated, or has changed since the corpus was prepared. Restore it, or prepare the corpus again.",
        )
    out[found:] = 0.0
    # The product is cheap, and finite only where all samples are; huge ones are looked at again.
    with np.errstate(over="ignore"):
        is_finite = math.isfinite(np.dot(out, out))
    if not is_finite and not np.isfinite(out).all():
        raise AudioError.because(
            "not_finite",
            f"cut {row['id']!r}: {_place(row)} holds NaN or Inf. Convert the file again, or leave it out.",
        )
    return out


def samples_in(duration: float, rate: int) -> int:
    """Returns the number of samples of a duration in seconds, rounded as Lhotse rounds it."""
    return math.floor(round(duration * rate, 8) + 0.5)


def open_audio(path: str) -> soundfile.SoundFile:
    """Opens a file to be read once from some place on.

    Raises:
        OSError: It cannot be opened, or is a directory, pipe, socket or device, which is not opened at all.
        soundfile.LibsndfileError: It is no audio that libsndfile knows.
    """
    check_regular_file(path)
    # By descriptor, which saves libsndfile's wrapper looking at the name, 3 % of a short file. libsndfile closes it,
    # also where it does not know the format.
    return _Stream(os.open(path, os.O_RDONLY))


class _Stream(soundfile.SoundFile):  # type: ignore[misc]  # it has no annotations
    """A file that is read once from some place on; without this, its place is sought anew after reading."""

    def seekable(self) -> bool:
        return False


def energy(samples: NDArray[np.float32]) -> float:
    """Returns the sum of squares."""
    # In double precision, so that what is left of the order of summation is gone in a gain of single precision.
    exact = samples.astype(np.float64)
    return float(exact.dot(exact))


def _read(row: Mapping[str, Any], offset_s: float, seconds: float, out: NDArray[np.float32]) -> int:
    """Fills `out` from the start; returns how many samples there were."""
    try:
        source = _source(row)
        transforms = row["recording"].get("transforms") or ()
        # A chain of resamplings is not what one of them would give.
        if source["type"] == "file" and (not transforms or (len(transforms) == 1 and _is_resampling(transforms[0]))):
            return _read_file(row, source, offset_s, seconds, out)
        return _read_by_lhotse(row, offset_s, seconds, out)
    except Exception as error:  # decoders raise what they like, and every one of them means the same here
        # libsndfile's own words, since its wrapper names the file by a number that is another in every process.
        detail = " ".join(getattr(error, "error_string", str(error)).split())[:300].rstrip(".")
        raise AudioError.because(
            _reason(_place(row), error),
            f"cut {row['id']!r}: cannot read {_place(row)}: {type(error).__name__}: {detail}. "
            "Restore the file, or leave it out and prepare the corpus again.",
        ) from error


def _read_file(
    row: Mapping[str, Any], source: Mapping[str, Any], offset_s: float, seconds: float, out: NDArray[np.float32]
) -> int:
    """The same for a file, whatever its rate."""
    opened = False
    try:
        with open_audio(source["source"]) as file:
            opened = True
            position = source["channels"].index(row["channel"])
            return _decode(file, position, row["recording"]["sampling_rate"], offset_s, seconds, out)
    except soundfile.LibsndfileError:
        if not opened and os.path.getsize(source["source"]):
            # Other decoders may know the format. Where they do not either, this error is the one that says why.
            with suppress(Exception):
                return _read_by_lhotse(row, offset_s, seconds, out)
        raise


def _decode(
    file: soundfile.SoundFile, channel: int, rate: int, offset_s: float, seconds: float, out: NDArray[np.float32]
) -> int:
    file_rate: int = file.samplerate
    if not file.frames:
        raise ValueError("it holds no samples")
    if offset_s:
        file.seek(min(samples_in(offset_s, file_rate), file.frames))
    if file_rate == rate and file.channels == 1 and channel == 0:
        return int(file.buffer_read_into(out, "float32"))
    number = len(out) if file_rate == rate else samples_in(seconds, file_rate)
    samples = file.read(number, dtype="float32", always_2d=True)[:, channel]
    return _fill(out, samples if file_rate == rate else _resample(samples, file_rate, rate, len(out)))


def _fill(out: NDArray[np.float32], samples: NDArray[np.float32]) -> int:
    found = min(len(samples), len(out))
    out[:found] = samples[:found]
    return found


def _read_by_lhotse(row: Mapping[str, Any], offset_s: float, duration: float, out: NDArray[np.float32]) -> int:
    recording = Recording.from_dict(deepcopy(row["recording"]))  # Lhotse takes apart what it is given
    transforms = [AudioTransform.from_dict(t) if isinstance(t, dict) else t for t in recording.transforms or []]
    for transform in reversed(transforms):
        offset_s, duration = transform.reverse_timestamps(
            offset=offset_s, duration=duration, sampling_rate=recording.sampling_rate
        )
    source = next(source for source in recording.sources if row["channel"] in source.channels)
    if source.type == "file":
        check_regular_file(source.source)
    # Opus is decoded at the rate it is asked for, which must be the one that the transforms start from.
    source_rate = getattr(transforms[0], "source_sampling_rate", None) if transforms else None
    samples = source.load_audio(offset_s, duration, force_opus_sampling_rate=source_rate or recording.sampling_rate)
    samples = np.atleast_2d(samples)[[source.channels.index(row["channel"])]]
    if transforms:
        with _one_torch_thread():
            for transform in transforms:
                samples = transform(samples, recording.sampling_rate)
    return _fill(out, np.asarray(samples[0], dtype=np.float32))


def _source(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the source that holds the channel of a cut."""
    found: dict[str, Any] = next(s for s in row["recording"]["sources"] if row["channel"] in s["channels"])
    return found


def _is_resampling(transform: Any) -> bool:
    name = transform["name"] if isinstance(transform, dict) else type(transform).__name__
    return bool(name == "Resample")


def _resample(samples: NDArray[np.float32], source_rate: int, rate: int, num_wanted: int) -> NDArray[np.float32]:
    if not len(samples):
        return samples
    with _one_torch_thread():
        resampled: NDArray[np.float32] = _resampler(source_rate, rate)(torch.tensor(samples)).numpy()
    # A span may begin and end between two samples of the file; Lhotse completes by reflection what that costs.
    short = num_wanted - len(resampled)
    return np.pad(resampled, (0, short), mode="reflect") if 0 < short <= rate / source_rate + 1 else resampled


@lru_cache(maxsize=32)
def _resampler(source_rate: int, rate: int) -> torch.nn.Module:
    """Holds the windowed sinc of a pair of rates, which costs more to make than a short cut to resample."""
    resampler: torch.nn.Module = torchaudio.transforms.Resample(source_rate, rate)
    return resampler


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Has torch work on one thread, as it does in loader workers: on several, resampling rounds differently."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _reason(path: str, error: Exception) -> AudioReason:
    """Finds out what the matter is with a file that could not be decoded."""
    if special_file_kind(path):
        return "not_a_file"
    if not os.path.isfile(path):
        return "missing" if isinstance(error, soundfile.LibsndfileError | OSError) else "unreadable"
    if os.path.getsize(path) == 0:
        return "empty"
    try:
        with open_audio(path) as file:
            if file.frames == 0:
                return "empty"
            try:
                file.seek(file.frames - 1)
                return "unreadable" if len(file.read(1)) else "truncated"
            except soundfile.LibsndfileError:
                return "truncated"  # its header is in order, and what should be its end is not there
    except (soundfile.LibsndfileError, OSError):
        return "unreadable"


def _place(row: Mapping[str, Any]) -> str:
    try:
        return str(_source(row)["source"])
    except StopIteration:
        return str(row["recording"]["sources"][0]["source"])
