"""Silero VAD: the probability of speech in each frame of 32 ms.

The package `silero-vad` carries the weights in several formats. Its own interface computes one frame per call, because
the last layer is recurrent. The other layers are not, so here they run over hundreds of frames at once, and the
recurrent layer over their sequence. The result equals that of the package up to rounding, at more than ten times its
speed, and does not depend on how the audio is divided into calls (benchmarks/results/segment_2cores_2026-11.md). When
the weights are loaded, a few frames are compared with the package's own network, so that another release is an error.

The weights come from the TorchScript file. `silero_vad_16k.safetensors`, which would be simpler to read, holds those of
another model in release 6.2.3. The package is not imported: its import sets the number of threads of torch for the
whole process.
"""

import importlib.util
import warnings
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.resampling import one_torch_thread
from nestdata.errors import ConfigError

if TYPE_CHECKING:
    import torch

RATE = 16000
"""Sampling rate of the detector, in Hz."""

FRAME_SAMPLES = 512
"""Length of a frame in samples."""

# Samples before a frame that the network reads as well.
_CONTEXT = 64
_FRAMES_AT_ONCE = 512
_NUM_BINS = 129
_HOP = 128
_STRIDES = (1, 2, 2, 1)
# Frames that are compared with the package when its weights are loaded, and the largest difference of probabilities:
# that of correct weights is 1e-5.
_COMPARED_FRAMES, _TOLERANCE = 8, 1e-3
_MISSING = "finding speech needs silero-vad. Install it with `pip install 'nest-pretrain[vad]'`."


def detector_name() -> str:
    """Returns name and version of the detector.

    Raises:
        ConfigError: It is not installed.
    """
    if not _weights_path().is_file():
        raise ConfigError(_MISSING)
    return f"silero-vad {version('silero-vad')}"


class DetectorState(NamedTuple):
    """What the detector remembers of the frames before."""

    context: NDArray[np.float32]
    """The last samples, shape (64,)."""

    recurrent: "tuple[torch.Tensor, torch.Tensor] | None" = None
    """State of the recurrent layer; None at the start of a recording."""


def start_state() -> DetectorState:
    """Returns the state at the start of a recording."""
    return DetectorState(np.zeros(_CONTEXT, np.float32))


def speech_probabilities(
    samples: NDArray[np.float32], state: DetectorState
) -> tuple[NDArray[np.float32], DetectorState]:
    """Computes the probability of speech in each frame.

    Args:
        samples: Audio at 16 kHz, amplitude in [-1, 1], shape (num_samples,); whole frames.
        state: State after the audio before it.

    Returns:
        One probability for each frame, shape (num_frames,), and the state after the last frame.
    """
    import torch

    found = []
    with one_torch_thread(), torch.inference_mode():
        for start in range(0, len(samples), _FRAMES_AT_ONCE * FRAME_SAMPLES):
            block = np.concatenate([state.context, samples[start : start + _FRAMES_AT_ONCE * FRAME_SAMPLES]])
            frames = torch.from_numpy(block).unfold(0, _CONTEXT + FRAME_SAMPLES, FRAME_SAMPLES)
            probabilities, recurrent = _network().forward(frames, state.recurrent)
            found.append(probabilities.numpy())
            state = DetectorState(block[-_CONTEXT:], recurrent)
    return np.concatenate(found) if found else np.empty(0, np.float32), state


class _Network:
    """The network for 16 kHz: a spectrum, four convolutions, a recurrent layer, and a linear layer."""

    def __init__(self, weights: "dict[str, torch.Tensor]") -> None:
        self._basis = weights["stft.forward_basis_buffer"]
        names = [f"encoder.{number}.reparam_conv" for number in range(len(_STRIDES))]
        self._convolutions = [(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in names]
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        self._recurrent = [weights[f"decoder.rnn.{kind}"] for kind in kinds]
        self._last = weights["decoder.decoder.2.weight"][:, :, 0], weights["decoder.decoder.2.bias"]

    def forward(self, frames: Any, state: Any) -> Any:
        """Returns the probabilities of consecutive frames, shape (frames,), and the state after them."""
        import torch
        from torch.nn.functional import conv1d, linear, pad, relu

        x = conv1d(pad(frames[:, None], (0, _CONTEXT), mode="reflect"), self._basis, stride=_HOP)
        x = (x[:, :_NUM_BINS] ** 2 + x[:, _NUM_BINS:] ** 2).sqrt()  # (frames, 258, 4) -> (frames, 129, 4)
        for (weight, bias), stride in zip(self._convolutions, _STRIDES, strict=True):
            x = relu(conv1d(x, weight, bias, stride=stride, padding=1))
        x = x.transpose(1, 2)  # (frames, 128, 1) -> (frames as time, batch of 1, 128)
        state = state or (torch.zeros(1, 1, 128), torch.zeros(1, 1, 128))
        # Not nn.LSTM, whose construction draws from the global generator of torch.
        x, *state = torch.lstm(x, state, self._recurrent, True, 1, 0.0, False, False, False)
        return linear(relu(x[:, 0]), *self._last)[:, 0].sigmoid(), tuple(state)


@cache
def _network() -> _Network:
    """Returns the network with the weights of the package, once it has been compared with the package's own.

    Raises:
        ConfigError: The installed release has another network, or its file cannot be read.
    """
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch recommends torch.export for new files
            model = torch.jit.load(str(_weights_path()), map_location="cpu")
        prefix = "_model."  # `_model_8k.` begins the names of the network for 8 kHz
        weights = {
            name.removeprefix(prefix): value for name, value in model.state_dict().items() if name.startswith(prefix)
        }
        network = _Network(weights)
        difference = _difference(network, model)
    except (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{_other_network()} {type(error).__name__}: {str(error)[:200]}") from error
    if not difference < _TOLERANCE:
        raise ConfigError(f"{_other_network()} The probabilities of speech differ by {difference:.2g}.")
    return network


def _difference(network: _Network, model: Any) -> float:
    """Returns the largest difference between the probabilities of the network and of the package's, for a sawtooth."""
    import torch

    times = torch.arange(_COMPARED_FRAMES * FRAME_SAMPLES) / RATE
    samples = 0.2 * (2 * (200 * times % 1) - 1)
    frames = torch.cat([torch.zeros(_CONTEXT), samples]).unfold(0, _CONTEXT + FRAME_SAMPLES, FRAME_SAMPLES)
    with torch.inference_mode():
        found, _ = network.forward(frames, None)
        expected = torch.stack([model(frame[None], RATE).reshape(()) for frame in samples.split(FRAME_SAMPLES)])
    return float((found - expected).abs().max())


def _other_network() -> str:
    return (
        f"{_weights_path()}: {detector_name()} does not have the network that is computed here. Install the release "
        "that is supported with `pip install 'nest-pretrain[vad]'`."
    )


def _weights_path() -> Path:
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(_MISSING)
    return Path(spec.submodule_search_locations[0]) / "data" / "silero_vad.jit"
