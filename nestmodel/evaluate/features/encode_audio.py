"""Encoder outputs of single audio files and of arrays, in one call."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from nestdata import load_audio
from nestmodel.errors import ExtractError
from nestmodel.evaluate.features.batch import (
    FeatureProblem,
    compute_batch,
    frame_rate_hz,
    in_eval_mode,
    layer_function,
)
from nestmodel.evaluate.features.config import Layers
from nestmodel.nn.network import NestNetwork

Audio = str | Path | NDArray[Any] | Tensor
_Several = list[Any] | tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AudioFeatures:
    """Encoder features of one piece of audio, on the CPU."""

    values: Float[Tensor, "*layers enc_frames dim"]
    """Valid frames: (enc_frames, dim) for one layer, (layers, enc_frames, dim) for several."""

    frame_rate_hz: float
    """Number of encoder frames per second."""

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.values.shape))
        return f"AudioFeatures(values: {shape}, frame_rate_hz: {self.frame_rate_hz:g})"


@overload
def encode(
    model: NestNetwork, audio: Audio, *, sampling_rate: int | None = None, layers: Layers = "last"
) -> AudioFeatures: ...


@overload
def encode(
    model: NestNetwork, audio: _Several, *, sampling_rate: int | None = None, layers: Layers = "last"
) -> list[AudioFeatures]: ...


def encode(
    model: NestNetwork, audio: Audio | _Several, *, sampling_rate: int | None = None, layers: Layers = "last"
) -> AudioFeatures | list[AudioFeatures]:
    """Computes the encoder features of an audio file or an array.

    The values are those that `nestmodel features` writes for the file, bit for bit, on the same device. Several files
    are encoded one by one, so that the features of one do not depend on the others; `iterate_features` computes those
    of a corpus in batches.

    Args:
        model: Its encoder is used, in eval mode, on its device.
        audio: Path or URL of a file of any sampling rate, of whose channels the first is read; or samples of shape
            (num_samples,): float32 or float64, usually in [-1, 1], or int16. Or a list of these.
        sampling_rate: Rate of arrays in Hz. They are resampled to the rate of the model. That of files is in their
            headers.
        layers: Numbers of the encoder outputs to return, `last` or `all`; see `iterate_features`.

    Returns:
        The features; a list for a list.

    Raises:
        ConfigError: The layers do not exist, or an array has another shape or type, or no rate.
        AudioError: The audio cannot be used.
        ExtractError: The audio is shorter than one encoder frame, or does not fit into memory.
        StorageError: A store cannot be read.
    """
    if isinstance(audio, (list, tuple)):
        return [encode(model, samples, sampling_rate=sampling_rate, layers=layers) for samples in audio]
    compute = layer_function(model, layers)
    source = audio.detach().cpu().numpy() if isinstance(audio, Tensor) else audio
    rate, device = model.config.features.sampling_rate, next(model.parameters()).device
    samples = load_audio(source, rate, source_rate=sampling_rate)
    with in_eval_mode(model, device):
        (found,) = compute_batch([samples], rate, compute, device)
    if isinstance(found, FeatureProblem):
        name = str(audio) if isinstance(audio, (str, Path)) else "the array"
        raise ExtractError(f"{name}: {found.reason}, {found.detail}")
    return AudioFeatures(torch.from_numpy(found[0] if len(found) == 1 else found), frame_rate_hz(model))
