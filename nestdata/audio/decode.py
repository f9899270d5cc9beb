"""Decoding of the samples of a cut, with resampling and checks.

Files are opened by `nestdata.audio.encoded` and decoded directly into the output array. If a cut is most
of a FLAC file that has nothing unusual, `nestdata.audio.flac` decodes it faster, to the same samples. Transforms other
than one resampling are left to Lhotse (`nestdata.audio.lhotse_audio`). Lhotse's own `load_audio` runs commands, and
fills up to half a second of missing audio by reflection without a warning; here, a file that is shorter than its cut is
an error. Decoding gives the same bits in every process, and bytes in memory are decoded to the same samples as a file
that holds them.

torch, torchaudio, Lhotse, torchcodec, soundfile and miniaudio are imported at first use, so that commands that decode
no audio start quickly.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.channels import is_mixed
from nestdata.audio.encoded import EncodedAudio
from nestdata.audio.lhotse_audio import name_of, needs_whole_cut, parsed_transforms, transformed
from nestdata.audio.reader import AudioReader
from nestdata.audio.resampling import resample
from nestdata.errors import AudioError, ConfigError

SILENCE_DB = -90.0
"""Mean power, in dB of full scale, below which audio is treated as silent."""

# Tolerance for resampling and lossy formats: their number of samples may differ slightly from the header's.
_LENGTH_TOLERANCE_S = 0.01
# Added to the length of a cut that is at most one millisecond shorter than its recording, to read up to the end of the
# recording, as Lhotse does.
_END_MARGIN_S = 0.002
# Shortest beginning of a FLAC file for which decoding the whole file with dr_flac is faster than libsndfile's decoding
# of the beginning; see docs/results.md.
_MIN_SHARE_OF_FLAC = 0.8
# OpenBLAS computes dot products of more than 10,000 elements in as many threads as there are cores. They wait actively
# for each other, and take the cores from other loader workers.
_BLAS_BLOCK = 8192


def load_samples(
    cut: Any,
    *,
    start: int = 0,
    num_samples: int | None = None,
    out: NDArray[np.float32] | None = None,
    content: bytes | None = None,
) -> NDArray[np.float32]:
    """Loads a cut, or a span of it, at the sampling rate of the cut.

    Args:
        cut: A Lhotse `MonoCut`, or the dict that its `to_dict` returns. Transforms such as resampling are applied.
        start: First sample to load, counted from the start of the cut.
        num_samples: Number of samples to load; by default, all up to the end of the cut.
        out: Array that receives the samples, shape (num_samples,); a new array by default.
        content: The bytes of the audio file that holds the channel of the cut; the source of the cut is then not
            opened, whatever its type.

    Returns:
        Exactly `num_samples` samples, shape (num_samples,), with the amplitude of the file, usually in [-1, 1].

    Raises:
        AudioError: The file is missing, unreadable or shorter than the cut, or has NaN or infinite samples. The content
            of `out` is then undefined.
        ConfigError: A transform needs a package that is not installed.
    """
    fields: Mapping[str, Any] = cut if isinstance(cut, Mapping) else cut.to_dict()
    rate = fields["recording"]["sampling_rate"]
    num_samples_of_cut = samples_in(fields["duration"], rate)
    if num_samples is None:
        num_samples = num_samples_of_cut - start
    if out is None:
        out = empty_samples(fields["id"], num_samples)
    is_span = num_samples < num_samples_of_cut and start + num_samples <= num_samples_of_cut
    if is_span and needs_whole_cut(fields["recording"]):
        out[:] = load_samples(cut, content=content)[start : start + num_samples]
        return out
    reaches_end = start + num_samples == num_samples_of_cut
    seconds = fields["duration"] - start / rate if reaches_end else num_samples / rate
    if start == 0 and math.isclose(seconds, fields["recording"]["duration"], abs_tol=1e-3):
        seconds += _END_MARGIN_S
    num_found = _read(fields, content, fields["start"] + start / rate, seconds, out)
    num_missing = num_samples - num_found
    if num_missing > _LENGTH_TOLERANCE_S * rate or not num_found:
        too_early = max(num_missing, num_samples_of_cut - start - num_found) / rate
        raise AudioError.because(
            "truncated",
            f"cut {fields['id']!r}: {_path_of(fields)} ends {too_early:.3f} s before the cut does: the file is "
            "truncated, or has changed since the corpus was prepared. Restore it, or prepare the corpus again.",
        )
    out[num_found:] = 0.0
    # A cheap first test: the dot product is finite only if all samples are. It also overflows for huge finite samples.
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = all(math.isfinite(np.dot(block, block)) for block in _blocks(out))
    if not is_finite and not np.isfinite(out).all():
        raise AudioError.because(
            "not_finite",
            f"cut {fields['id']!r}: {_path_of(fields)} holds NaN or Inf. Convert the file again, or remove it.",
        )
    return out


def empty_samples(cut_id: str, num_samples: int) -> NDArray[np.float32]:
    """Returns an uninitialised array for the samples of a cut; its pages take memory only when they are filled.

    Raises:
        AudioError: There is not enough memory.
    """
    try:
        return np.empty(num_samples, np.float32)
    except (MemoryError, ValueError) as error:
        raise AudioError.because(
            "unreadable",
            f"cut {cut_id!r}: {num_samples} samples do not fit into memory. Divide the recording with "
            "--window-seconds, or remove it if it is not so long.",
        ) from error


def samples_in(duration: float, rate: int) -> int:
    """Returns the number of samples of a duration in seconds, rounded as in Lhotse."""
    return math.floor(round(duration * rate, 8) + 0.5)


def at_rate(recording: Mapping[str, Any], rate: int) -> dict[str, Any]:
    """Returns a copy of a recording at a rate in Hz; if its own rate differs, with a transform that resamples it.

    Lhotse applies the transform when it loads the recording. The duration in seconds does not change.
    """
    source = recording["sampling_rate"]
    if source == rate:
        return dict(recording)
    kwargs = {"source_sampling_rate": source, "target_sampling_rate": rate}
    transforms = [*(recording.get("transforms") or []), {"name": "Resample", "kwargs": kwargs}]
    num_samples = samples_in(recording["duration"], rate)
    return {**recording, "num_samples": num_samples, "sampling_rate": rate, "transforms": transforms}


def energy(samples: NDArray[np.float32]) -> float:
    """Returns the sum of squares."""
    # In double precision, so that a gain rounded to single precision does not depend on the order of summation.
    exact = (block.astype(np.float64) for block in _blocks(samples))
    return sum((float(block.dot(block)) for block in exact), 0.0)


def _blocks(samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Yields parts of samples that are short enough for BLAS to stay in this thread; see `_BLAS_BLOCK`."""
    for start in range(0, len(samples), _BLAS_BLOCK):
        yield samples[start : start + _BLAS_BLOCK]


def _read(
    fields: Mapping[str, Any],
    content: bytes | None,
    offset_s: float,
    seconds: float,
    out: NDArray[np.float32],
) -> int:
    """Fills `out` from its start and returns the number of samples found.

    Args:
        fields: The cut as a dict.
        content: The bytes of the audio file, if they have been read.
        offset_s: Start in the recording, in seconds.
        seconds: Length to read, in seconds.
        out: Array that receives the samples.
    """
    audio = EncodedAudio(_path_of(fields), content)
    try:
        source = _source(fields)
        if source["type"] != "file" and content is None:
            raise ValueError(f"an audio source of type {source['type']!r} is not supported here")
        channel = None if is_mixed(fields) else source["channels"].index(fields["channel"])
        recording = fields["recording"]
        rate, transforms = recording["sampling_rate"], list[Any]()
        # Two resamplings in a row differ from a single one.
        if [name_of(transform) for transform in recording.get("transforms") or ()] not in ([], ["Resample"]):
            transforms = parsed_transforms(recording)
            for transform in reversed(transforms):
                offset_s, seconds = transform.reverse_timestamps(offset=offset_s, duration=seconds, sampling_rate=rate)
        elif num_found := _decode_flac(recording, audio, channel, offset_s, seconds, out):
            return num_found
        with audio.open(offset_s + seconds) as file:
            if offset_s:
                file.seek(samples_in(offset_s, file.rate))
            return _decode(file, channel, transforms, rate, seconds, out)
    except (AudioError, ConfigError):
        raise
    except Exception as error:  # decoders raise many types, all of which mean that the audio cannot be read
        # libsndfile's own message: soundfile adds the file descriptor, which differs between processes.
        detail = " ".join(getattr(error, "error_string", str(error)).split())[:300].rstrip(".")
        raise AudioError.because(
            audio.failure_reason(error),
            f"cut {fields['id']!r}: cannot read {audio.path}: {type(error).__name__}: {detail}{audio.advice()}. "
            "Restore the file, or remove it and prepare the corpus again.",
        ) from error


def _decode_flac(
    recording: Mapping[str, Any],
    audio: EncodedAudio,
    channel: int | None,
    offset_s: float,
    seconds: float,
    out: NDArray[np.float32],
) -> int:
    """Does the work of `_decode` with dr_flac; returns 0 if libsndfile has to do it."""
    # libsndfile seeks to a later start, which may fail in a file that can be decoded from its beginning.
    if offset_s or seconds < _MIN_SHARE_OF_FLAC * recording["duration"]:
        return 0
    flac, rate = audio.read_flac(), recording["sampling_rate"]
    if flac is None or (channel or 0) >= flac.header.num_channels:
        return 0
    file = flac.header
    num_samples = len(out) if file.rate == rate else samples_in(seconds, file.rate)
    if num_samples < _MIN_SHARE_OF_FLAC * file.num_samples:  # the header may differ from the manifest
        return 0
    if file.rate == rate and file.num_channels == 1 and len(out) == file.num_samples:
        return len(out) if flac.decode(out) else 0
    decoded = np.empty((file.num_samples, file.num_channels), np.float32)
    if not flac.decode(decoded):
        return 0
    samples = _select(decoded[:num_samples], channel)
    return _fill(out, samples if file.rate == rate else _resample(samples, file.rate, rate, len(out)))


def _decode(
    file: AudioReader, channel: int | None, transforms: list[Any], rate: int, seconds: float, out: NDArray[np.float32]
) -> int:
    """Fills `out` with the next samples of an open file, after transforms if there are any, and returns their number.

    `channel` is the index of the channel in the file, or None for the average of all; `rate` is the rate of `out`.
    """
    if file.num_samples == 0:
        raise ValueError("it holds no samples")
    has_rate = file.rate == rate and not transforms
    if has_rate and file.num_channels == 1 and not channel:
        num_found = file.read_into(out)
        _check_damage(file, len(out) - num_found)
        return num_found
    num_samples = len(out) if has_rate else samples_in(seconds, file.rate)
    samples = _select(file.read(num_samples), channel)
    _check_damage(file, num_samples - len(samples))
    if transforms:
        return _fill(out, transformed(samples, transforms, rate))
    return _fill(out, samples if has_rate else _resample(samples, file.rate, rate, len(out)))


def _check_damage(file: AudioReader, num_missing: int) -> None:
    """Raises the error of an open file if it gave fewer samples than were asked for, apart from rounding."""
    if file.damage is not None and num_missing > (_LENGTH_TOLERANCE_S + _END_MARGIN_S) * file.rate:
        raise file.damage


def _select(samples: NDArray[Any], channel: int | None) -> NDArray[Any]:
    """Returns one channel of samples of shape (num_samples, num_channels), or their average for None."""
    if channel is not None:
        return samples[:, channel]
    # One channel after the other, so that the rounding does not depend on how NumPy sums an axis.
    mixed = samples[:, 0].copy()
    for number in range(1, samples.shape[1]):
        mixed += samples[:, number]
    if samples.shape[1] > 1:
        mixed /= np.float32(samples.shape[1])
    return mixed


def _fill(out: NDArray[Any], samples: NDArray[Any]) -> int:
    """Copies samples to the start of `out`, as many as it holds, and returns their number."""
    num_found = min(len(samples), len(out))
    out[:num_found] = samples[:num_found]
    return num_found


def _source(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the source of the recording that holds the channel of the cut."""
    found: dict[str, Any] = next(s for s in fields["recording"]["sources"] if fields["channel"] in s["channels"])
    return found


def _resample(samples: NDArray[np.float32], source_rate: int, rate: int, num_wanted: int) -> NDArray[np.float32]:
    if not len(samples):
        return samples
    resampled = resample(samples, source_rate, rate)
    # A span may start and end between two samples of the file, which loses samples; as in Lhotse, they are filled in
    # by reflection.
    num_lost = num_wanted - len(resampled)
    return np.pad(resampled, (0, num_lost), mode="reflect") if 0 < num_lost <= rate / source_rate + 1 else resampled


def _path_of(fields: Mapping[str, Any]) -> str:
    try:
        return str(_source(fields)["source"])
    except StopIteration:
        return str(fields["recording"]["sources"][0]["source"])
