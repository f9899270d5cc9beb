"""Loads single audio files and arrays at a sampling rate, to the samples that a corpus prepared from them has."""

import os
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.decode import load_samples
from nestdata.errors import AudioError, ConfigError
from nestdata.prepare.found import Cut, Reject
from nestdata.prepare.inputs.entry import Entry, File, Member
from nestdata.prepare.inputs.remote import with_members
from nestdata.prepare.prepare_config import PrepareConfig
from nestdata.prepare.run import probe
from nestdata.storage import ObjectInfo, is_url

_SUBTYPES = {"float32": "FLOAT", "float64": "FLOAT", "int16": "PCM_16"}
"""Encodings that keep the samples of an array; double precision is rounded to single precision."""


def load_audio(
    audio: str | Path | NDArray[Any], sampling_rate: int = 16000, *, source_rate: int | None = None
) -> NDArray[np.float32]:
    """Loads an audio file or an array at a sampling rate.

    The samples equal those that `Corpus.load` returns for a corpus that was prepared from the file. If it has several
    channels, they are from the first. An array gives the same samples as a file that holds it.

    Args:
        audio: Path or URL of a file; or samples of shape (num_samples,), floating-point numbers that are usually in
            [-1, 1], or 16-bit integers.
        sampling_rate: Rate of the result in Hz.
        source_rate: Rate of an array in Hz; files have their rate in the header.

    Returns:
        Amplitudes, shape (num_samples,), usually in [-1, 1].

    Raises:
        AudioError: The file cannot be used, or there are NaN or infinite samples.
        ConfigError: An array has another shape or type, or no rate; or a rate is given for a file.
        StorageError: A store cannot be read.
    """
    config = PrepareConfig(sampling_rate=sampling_rate, min_seconds=0.0)
    if isinstance(audio, (str, Path)):
        if source_rate is not None:
            raise ConfigError(f"{audio}: the rate of a file is in its header. Leave the sampling rate out.")
        name, advice = str(audio), " Give an audio file, such as WAV or FLAC."
        path = name if is_url(name) else os.path.abspath(name)
        ((_, entry),) = with_members([(1, Entry(path, path, File(path)))], lambda _: True)
    else:
        content = _as_file(audio, source_rate, config.min_rate)
        name, advice = "the array", ""
        shard = ObjectInfo(name, len(content), None)
        entry = Entry(name, name, Member(shard, 0, len(content), start=content))
    found = probe(entry, config)[0]  # notes follow
    if isinstance(found, Reject):
        detail = found.detail if name in found.detail else f"{name}: {found.reason}, {found.detail}"
        raise AudioError(f"{detail}.{advice}")
    assert isinstance(found, Cut)  # speech is not looked for
    return load_samples(found.row, content=entry.audio.read())


def _as_file(samples: Any, rate: Any, min_rate: int) -> bytes:
    """Returns a WAV file of an array.

    Raises:
        ConfigError: The array has another type or shape, or the rate is not an integer, or is too low.
        AudioError: The array has NaN or infinite samples.
    """
    import soundfile

    if not isinstance(samples, np.ndarray) or samples.dtype.name not in _SUBTYPES:
        found = samples.dtype.name if isinstance(samples, np.ndarray) else type(samples).__name__
        raise ConfigError(
            f"audio is {found}: expected the path of an audio file, or an array of float32, float64 or int16."
        )
    if samples.ndim != 1 or not len(samples):
        raise ConfigError(
            f"the array has the shape {samples.shape}: expected (num_samples,). Take one channel, or the average of "
            "all channels."
        )
    if not np.isfinite(samples).all():
        number = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise AudioError.because("not_finite", f"sample {number} of the array is {samples[number]}. Remove it.")
    if not isinstance(rate, (int, np.integer)):
        raise ConfigError(f"the sampling rate of the array is {rate!r}: give it in Hz, such as 16000.")
    if rate < min_rate:
        raise ConfigError(f"the sampling rate of the array is {rate} Hz: the minimum is {min_rate} Hz.")
    file = BytesIO()
    soundfile.write(file, samples, int(rate), format="WAV", subtype=_SUBTYPES[samples.dtype.name])
    return file.getvalue()
