"""The work that is left to Lhotse: transforms of samples.

Lhotse also runs commands: for sources of type "command" and URLs that begin with `pipe:`, and in some of its decoders,
which write the name of the file into a command line. So it is never given a source to load, and of its transforms, only
those are used that read no audio.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.resampling import has_small_kernel, one_torch_thread, resample

_TRANSFORMS = frozenset(
    {
        *("Resample", "Speed", "Tempo", "Volume", "Narrowband", "Compress", "Clipping", "LoudnessNormalization"),
        *("DereverbWPE", "ReverbWithImpulseResponse"),
    }
)
# A resampling to a higher rate would take memory without a bound.
_MAX_RATE = 1_000_000
# A factor of a speed near 0, or a very high one, would take memory without a bound as well.
_FACTORS = (0.1, 10.0)
# The rate in Hz of the codecs of the transform `Narrowband`, which computes the kernels of Lhotse.
_NARROWBAND_RATE = 8000


def check_transforms(transforms: Sequence[Any]) -> None:
    """Checks the transforms of a recording, as dicts.

    Raises:
        ValueError: One is unknown, would read other audio, or would take too much memory.
    """
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


def parsed_transforms(transforms: Sequence[Any]) -> list[Any]:
    """Returns the transforms of a recording as Lhotse's objects.

    Raises:
        ValueError: As for `check_transforms`.
    """
    from lhotse.augmentation import AudioTransform

    as_dicts = [transform if isinstance(transform, dict) else transform.to_dict() for transform in transforms]
    check_transforms(as_dicts)
    return [AudioTransform.from_dict({**transform, "kwargs": {**transform["kwargs"]}}) for transform in as_dicts]


def transformed(samples: NDArray[np.float32], transforms: Sequence[Any], rate: int) -> NDArray[np.float32]:
    """Returns samples, shape (num_samples,), after transforms.

    Args:
        samples: Shape (num_samples,).
        transforms: Lhotse's objects.
        rate: Rate of the recording in Hz after all transforms, which Lhotse passes to each of them.
    """
    for transform in transforms:
        kind = type(transform).__name__
        # Lhotse keeps the kernels of all pairs of rates, of any size.
        if kind == "Resample":
            samples = resample(samples, transform.source_sampling_rate, transform.target_sampling_rate)
        elif kind == "Speed":
            samples = resample(samples, round(rate * transform.factor), rate)
        else:
            with one_torch_thread():
                samples = np.asarray(transform(samples[None], rate)[0], dtype=np.float32)
    return samples
