"""The work that is left to Lhotse: transforms of samples.

Lhotse also runs commands: for sources of type "command" and URLs that begin with `pipe:`, and in some of its decoders,
which write the name of the file into a command line. So it is never given a source to load, and of its transforms, only
those are used that read no audio.

A transform gives the same samples at every load and in every process. A simulated room, whose random numbers Lhotse
draws in part from the global generator of torch, is computed from the seeds in the manifest alone.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.resampling import has_small_kernel, one_torch_thread, resample
from nestdata.errors import ConfigError
from nestdata.stateless_rng import derive_key

# Transforms that give the same samples for a span as for the whole audio, except near the ends of the span.
_LOCAL_TRANSFORMS = frozenset({"Resample", "Speed", "Volume"})
_TRANSFORMS = _LOCAL_TRANSFORMS | {
    *("Tempo", "Narrowband", "Compress", "Clipping", "LoudnessNormalization"),
    *("DereverbWPE", "ReverbWithImpulseResponse"),
}
# The modules that transforms import when they are applied, and how to get them.
_MODULES = {
    "LoudnessNormalization": ("pyloudnorm", "Install it: pip install pyloudnorm"),
    "DereverbWPE": ("nara_wpe", "Install it: pip install nara_wpe"),
    "Tempo": (
        "torchaudio.sox_effects",
        "Torchaudio has it up to 2.8. Where such a version is installed, write the audio to files with "
        "`CutSet.save_audios` of Lhotse",
    ),
}
# A resampling to a higher rate would take memory without a bound.
_MAX_RATE = 1_000_000
# A factor of a speed near 0, or a very high one, would take memory without a bound as well.
_FACTORS = (0.1, 10.0)
# Limits of the numbers that decide how much memory and time the removal of reverberation takes.
_WPE_LIMITS = {"n_fft": (16, 4096), "hop_length": (8, 4096), "taps": (1, 64), "delay": (0, 64), "iterations": (1, 16)}
# Longest response of a simulated room, in samples: 12 s at 16 kHz. Lhotse computes 64 times as many.
_MAX_ROOM_SAMPLES = 192_000
# The rate in Hz of the codecs of the transform `Narrowband`, which computes the kernels of Lhotse.
_NARROWBAND_RATE = 8000


def check_transforms(transforms: Sequence[Any], rate: int) -> None:
    """Checks the transforms of a recording, as dicts.

    Args:
        transforms: The transforms.
        rate: Rate of the recording in Hz after all transforms.

    Raises:
        ValueError: One is unknown, would read other audio, or would take too much memory.
        ConfigError: One needs a package that is not installed.
    """
    if not 1 <= rate <= _MAX_RATE:
        raise ValueError(f"a recording with transforms at {rate} Hz is not supported")
    for transform in transforms:
        name, arguments = transform["name"], transform["kwargs"]
        if name not in _TRANSFORMS:
            raise ValueError(f"the transform {name!r} is not supported")
        if arguments.get("rir") is not None:
            raise ValueError(f"the transform {name!r} with a recorded impulse response is not supported")
        factor = arguments.get("factor", 1.0)
        if name in ("Speed", "Tempo") and not _FACTORS[0] <= factor <= _FACTORS[1]:
            raise ValueError(f"the transform {name!r} by {factor} is not supported")
        rates = [int(value) for key, value in arguments.items() if key.endswith("_sampling_rate")]
        is_wide = name == "Narrowband" and not all(has_small_kernel(rate, _NARROWBAND_RATE) for rate in rates)
        if is_wide or not all(1 <= rate <= _MAX_RATE for rate in rates):
            raise ValueError(f"the transform {name!r} at {' and '.join(map(str, rates))} Hz is not supported")
        if name == "DereverbWPE":
            for key, (low, high) in _WPE_LIMITS.items():
                value = arguments.get(key, low)
                if type(value) is not int or not low <= value <= high:
                    raise ValueError(f"the transform {name!r} with {key} {value!r} is not supported")
        if name == "ReverbWithImpulseResponse":
            _check_room(arguments.get("rir_generator") or {})
        if name in _MODULES:
            module, remedy = _MODULES[name]
            if not _has_module(module):
                raise ConfigError(f"the transform {name!r} needs {module}, which is not installed. {remedy}.")


def _check_room(generator: Any) -> None:
    """Raises ValueError unless a simulated room takes a limited amount of memory."""
    rate, max_seconds = generator.get("sr", 16000), generator.get("max_T60", 0.8)
    if type(rate) is not int or not 1000 <= rate <= _MAX_ROOM_SAMPLES:
        raise ValueError(f"the transform 'ReverbWithImpulseResponse' at {rate!r} Hz is not supported")
    if not 0.1 <= max_seconds <= _MAX_ROOM_SAMPLES / rate:
        raise ValueError(f"the transform 'ReverbWithImpulseResponse' of {max_seconds!r} s is not supported")


def _has_module(name: str) -> bool:
    import nestdata.filters  # noqa: F401  # imports the package torchaudio, beside every torch

    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def needs_whole_cut(recording: Mapping[str, Any]) -> bool:
    """Returns whether transforms of a recording are applied to a whole cut, also if a span of it is loaded.

    The loudness of a span differs from that of the cut, and a span has no reverberation from before its start.
    """
    return any(name_of(transform) not in _LOCAL_TRANSFORMS for transform in recording.get("transforms") or ())


def file_rate(recording: Mapping[str, Any]) -> int:
    """Returns the sampling rate in Hz of the file of a recording, before its transforms, which are dicts."""
    rate: int = recording["sampling_rate"]
    transforms = recording.get("transforms")
    return _rates_before(transforms, rate)[0] if transforms else rate


def parsed_transforms(recording: Mapping[str, Any]) -> list[Any]:
    """Returns the transforms of a recording as Lhotse's objects.

    A simulated room without seeds, for which Lhotse would draw them anew at each load, gets seeds from the id of the
    recording.

    Raises:
        ValueError, ConfigError: As for `check_transforms`.
    """
    from lhotse.augmentation import AudioTransform

    import nestdata.filters  # noqa: F401  # Lhotse cannot import torchaudio by itself beside every torch

    transforms = recording["transforms"]
    as_dicts = [transform if isinstance(transform, dict) else transform.to_dict() for transform in transforms]
    check_transforms(as_dicts, recording["sampling_rate"])
    parsed = []
    for transform in as_dicts:
        arguments = {**transform["kwargs"]}
        if (room := arguments.get("rir_generator")) is not None:
            seeds = {key: derive_key(0, f"{key} of {recording['id']}") for key in ("room_seed", "source_seed")}
            arguments["rir_generator"] = {**seeds, **{key: v for key, v in room.items() if v is not None}}
        parsed.append(AudioTransform.from_dict({**transform, "kwargs": arguments}))
    return parsed


def transformed(samples: NDArray[np.float32], transforms: Sequence[Any], rate: int) -> NDArray[np.float32]:
    """Returns samples, shape (num_samples,), after transforms.

    Args:
        samples: Shape (num_samples,).
        transforms: Lhotse's objects.
        rate: Rate of the recording in Hz after all transforms. Lhotse passes it to each of them, so that loudness is
            measured, and a codec applied, at a wrong rate before a resampling; here, they get the rate of the samples.
    """
    for transform, transform_rate in zip(transforms, _rates_before(transforms, rate), strict=True):
        kind = name_of(transform)
        # Lhotse keeps the kernels of all pairs of rates, of any size.
        if kind == "Resample":
            samples = resample(samples, transform.source_sampling_rate, transform.target_sampling_rate)
        elif kind == "Speed":
            samples = resample(samples, round(rate * transform.factor), rate)
        else:
            num_samples = len(samples)
            with one_torch_thread(), _drawing_from_seeds(transform):
                samples = np.asarray(transform(samples[None], transform_rate)[0], dtype=np.float32)
            if kind == "DereverbWPE":  # drops the last, incomplete frame
                samples = np.pad(samples, (0, num_samples - len(samples)))
    return samples


def _rates_before(transforms: Sequence[Any], rate: int) -> list[int]:
    """Returns the rate in Hz of the samples that each transform gets; `rate` is that after all of them."""
    rates = []
    for transform in reversed(transforms):
        arguments = transform["kwargs"] if isinstance(transform, Mapping) else vars(transform)
        rate = arguments.get("source_sampling_rate", rate)
        rates.append(rate)
    return rates[::-1]


def _drawing_from_seeds(transform: Any) -> AbstractContextManager[Any]:
    """Returns a context in which a simulated room depends on its seeds alone."""
    room = getattr(transform, "rir_generator", None)
    if room is None:
        return nullcontext()
    import torch
    from torch.overrides import TorchFunctionMode

    generator = torch.Generator().manual_seed(derive_key(room.room_seed, "room", room.source_seed))

    class Seeded(TorchFunctionMode):
        """Passes the generator to the function by which Lhotse draws from that of torch; other threads go on."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.Tensor.multinomial:
                kwargs = {**kwargs, "generator": generator}
            return func(*args, **kwargs)

    return Seeded()


def name_of(transform: Any) -> str:
    """Returns the name of a transform, a dict or an object of Lhotse."""
    return str(transform["name"]) if isinstance(transform, Mapping) else type(transform).__name__
