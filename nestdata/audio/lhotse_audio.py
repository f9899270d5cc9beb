"""The work that is left to Lhotse: transforms of samples.

Lhotse also runs commands: for sources of type "command" and URLs that begin with `pipe:`, and in some of its decoders,
which write the name of the file into a command line. So it is never given a source to load. Only its transforms of
rate, speed, tempo and volume are used: they read no other audio, and give the same samples at every load and in every
process.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.resampling import one_torch_thread, resample
from nestdata.errors import ConfigError

# Transforms that give the same samples for a span as for the whole audio, except near the ends of the span.
_LOCAL_TRANSFORMS = frozenset({"Resample", "Speed", "Volume"})
_TRANSFORMS = _LOCAL_TRANSFORMS | {"Tempo"}
_TEMPO_MODULE = "torchaudio.sox_effects"
# A resampling to a higher rate would take memory without a bound.
_MAX_RATE = 1_000_000
# A factor of a speed near 0, or a very high one, would take memory without a bound as well.
_FACTORS = (0.1, 10.0)


def check_transforms(transforms: Sequence[Any], rate: int) -> None:
    """Checks the transforms of a recording, as dicts.

    Args:
        transforms: The transforms.
        rate: Rate of the recording in Hz after all transforms.

    Raises:
        ValueError: One is not supported, or would take too much memory.
        ConfigError: One needs a package that is not installed.
    """
    if not 1 <= rate <= _MAX_RATE:
        raise ValueError(f"a recording with transforms at {rate} Hz is not supported")
    for transform in transforms:
        name, arguments = transform["name"], transform["kwargs"]
        if name not in _TRANSFORMS:
            raise ValueError(f"the transform {name!r} is not supported")
        factor = arguments.get("factor", 1.0)
        if name in ("Speed", "Tempo") and not _FACTORS[0] <= factor <= _FACTORS[1]:
            raise ValueError(f"the transform {name!r} by {factor} is not supported")
        rates = [int(value) for key, value in arguments.items() if key.endswith("_sampling_rate")]
        if not all(1 <= rate <= _MAX_RATE for rate in rates):
            raise ValueError(f"the transform {name!r} at {' and '.join(map(str, rates))} Hz is not supported")
        if name == "Tempo" and not _has_module(_TEMPO_MODULE):
            raise ConfigError(
                f"the transform {name!r} needs {_TEMPO_MODULE}, which is not installed. Torchaudio has it up to 2.8. "
                "Where such a version is installed, write the audio to files with `CutSet.save_audios` of Lhotse."
            )


def _has_module(name: str) -> bool:
    import nestdata.filters  # noqa: F401  # imports the package torchaudio, beside every torch

    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def needs_whole_cut(recording: Mapping[str, Any]) -> bool:
    """Returns whether transforms of a recording are applied to a whole cut, also if a span of it is loaded.

    A change of tempo does not give the same samples for a span.
    """
    return any(name_of(transform) not in _LOCAL_TRANSFORMS for transform in recording.get("transforms") or ())


def file_rate(recording: Mapping[str, Any]) -> int:
    """Returns the sampling rate in Hz of the file of a recording, before its transforms, which are dicts."""
    rate: int = recording["sampling_rate"]
    transforms = recording.get("transforms")
    return _rates_before(transforms, rate)[0] if transforms else rate


def parsed_transforms(recording: Mapping[str, Any]) -> list[Any]:
    """Returns the transforms of a recording as Lhotse's objects.

    Raises:
        ValueError, ConfigError: As for `check_transforms`.
    """
    from lhotse.augmentation import AudioTransform

    import nestdata.filters  # noqa: F401  # Lhotse cannot import torchaudio by itself beside every torch

    transforms = recording["transforms"]
    as_dicts = [transform if isinstance(transform, dict) else transform.to_dict() for transform in transforms]
    check_transforms(as_dicts, recording["sampling_rate"])
    return [AudioTransform.from_dict(transform) for transform in as_dicts]


def transformed(samples: NDArray[np.float32], transforms: Sequence[Any], rate: int) -> NDArray[np.float32]:
    """Returns samples, shape (num_samples,), after transforms.

    Args:
        samples: Shape (num_samples,).
        transforms: Lhotse's objects.
        rate: Rate of the recording in Hz after all transforms. Lhotse passes it to each of them; here, each gets the
            rate of its samples.
    """
    for transform, transform_rate in zip(transforms, _rates_before(transforms, rate), strict=True):
        kind = name_of(transform)
        # Lhotse keeps the kernels of all pairs of rates, of any size.
        if kind == "Resample":
            samples = resample(samples, transform.source_sampling_rate, transform.target_sampling_rate)
        elif kind == "Speed":
            samples = resample(samples, round(rate * transform.factor), rate)
        else:
            with one_torch_thread():
                samples = np.asarray(transform(samples[None], transform_rate)[0], dtype=np.float32)
    return samples


def _rates_before(transforms: Sequence[Any], rate: int) -> list[int]:
    """Returns the rate in Hz of the samples that each transform gets; `rate` is the rate after all of them."""
    rates = []
    for transform in reversed(transforms):
        arguments = transform["kwargs"] if isinstance(transform, Mapping) else vars(transform)
        rate = arguments.get("source_sampling_rate", rate)
        rates.append(rate)
    return rates[::-1]


def name_of(transform: Any) -> str:
    """Returns the name of a transform, a dict or an object of Lhotse."""
    return str(transform["name"]) if isinstance(transform, Mapping) else type(transform).__name__
