import importlib.util
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from nestdata import ConfigError
from nestdata.audio import decode
from nestdata.prepare.speech import detector, frames
from nestdata.prepare.speech.detector import FRAME_SAMPLES, detector_name, speech_probabilities, start_state
from tests.nestdata.prepare.speech.recordings import joined, needs_vad, utterance
from tests.synthesis import Samples, hiss, tone, write_audio


def whole_frames(samples: Samples) -> Samples:
    return samples[: len(samples) // FRAME_SAMPLES * FRAME_SAMPLES]


@needs_vad
def test_probabilities_are_those_of_the_package_frame_by_frame() -> None:
    samples = whole_frames(joined([0.5, 1.0]).samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.load(str(detector._weights_path()))
    with torch.inference_mode():
        blocks = torch.from_numpy(samples).split(FRAME_SAMPLES)
        expected = [model(block[None], 16000).item() for block in blocks]
    found, _ = speech_probabilities(samples, start_state())
    # The sums of a convolution are in another order; 1e-5 was measured.
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert found.max() > 0.9
    assert found.min() < 0.1


@needs_vad
def test_the_state_continues_from_call_to_call() -> None:
    samples = whole_frames(utterance(3))
    whole, _ = speech_probabilities(samples, start_state())
    state, parts = start_state(), []
    for start in range(0, len(samples), 7 * FRAME_SAMPLES):
        part, state = speech_probabilities(samples[start : start + 7 * FRAME_SAMPLES], state)
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)  # rounding of single precision


@needs_vad
def test_noise_and_tones_are_no_speech() -> None:
    for samples in (hiss(64 * FRAME_SAMPLES, 0), tone(440, 64 * 0.032), np.zeros(64 * FRAME_SAMPLES, np.float32)):
        assert speech_probabilities(samples, start_state())[0].max() < 0.5


@needs_vad
def test_the_number_of_threads_and_the_generator_of_torch_stay_as_they_are() -> None:
    detector._network.cache_clear()
    before = torch.get_num_threads(), torch.get_rng_state()
    speech_probabilities(np.zeros(FRAME_SAMPLES, np.float32), start_state())
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@needs_vad
def test_blocks_of_a_long_recording_give_the_frames_of_one_block(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = joined([0.3, 2.0]).samples
    path = write_audio(tmp_path / "a.wav", recording)
    row = {
        "id": "a",
        "start": 0.0,
        "duration": len(recording) / 16000,
        "channel": 0,
        "recording": {
            "sources": [{"type": "file", "channels": [0], "source": str(path)}],
            "sampling_rate": 16000,
            "num_samples": len(recording),
            "duration": len(recording) / 16000,
        },
    }
    whole = frames.speech_frames(row)
    assert len(whole.powers) == -(-len(recording) // FRAME_SAMPLES)
    loaded = decode.load_samples(row)
    np.testing.assert_allclose(whole.powers[3], np.square(loaded[3 * 512 : 4 * 512]).mean(), rtol=1e-6)
    monkeypatch.setattr(frames, "_BLOCK_FRAMES", 20)
    blocks = frames.speech_frames(row)
    np.testing.assert_allclose(blocks.probabilities, whole.probabilities, atol=1e-5)
    np.testing.assert_array_equal(blocks.powers, whole.powers)
    assert blocks.error is None


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"^finding speech needs silero-vad. .*`pip install 'nest-pretrain\[vad\]'`.$"
    ):
        detector_name()


class OtherModel(torch.nn.Module):
    """A network with the names and shapes of the package's, and other probabilities."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self._model = torch.nn.Module()
        for name, value in original.state_dict().items():
            if name.startswith("_model."):
                *path, last = name.split(".")[1:]
                module = self._model
                for part in path:
                    module = module._modules.setdefault(part, torch.nn.Module())  # type: ignore[assignment]
                module.register_buffer(last, value)

    def forward(self, samples: torch.Tensor, _rate: int) -> torch.Tensor:
        return samples.sum() * 0 + 0.5


@needs_vad
@pytest.mark.parametrize("kind", ["another network", "other names", "damaged"])
def test_another_release_of_the_package_is_one_clear_error(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "silero_vad.jit"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        original = torch.jit.load(str(detector._weights_path()))
        model = OtherModel(original) if kind == "another network" else torch.nn.Linear(1, 1)
        torch.jit.save(torch.jit.script(model), path)
    if kind == "damaged":
        path.write_bytes(path.read_bytes()[:100])
    monkeypatch.setattr(detector, "_weights_path", lambda: path)
    why = {
        "another network": "The probabilities of speech differ by 0",
        "other names": "KeyError: .*stft",
        "damaged": "",
    }
    detector._network.cache_clear()
    with pytest.raises(
        ConfigError, match=rf"silero-vad 6\S+ does not have the network .* 'nest-pretrain\[vad\]'`. {why[kind]}"
    ):
        speech_probabilities(np.zeros(FRAME_SAMPLES, np.float32), start_state())
    detector._network.cache_clear()
