import numpy as np
import pytest
import torch

from nestmodel import ExtractConfig, ExtractError, NestConfig, NestNetwork, encode
from nestmodel.errors import ConfigError
from nestmodel.evaluate import windows
from nestmodel.evaluate.windows import longest_whole_s, needed_bytes
from tests.synthesis import hiss
from tests.training import tiny_config

RATE = 16000


def network(**encoder: object) -> NestNetwork:
    return NestNetwork(tiny_config(**encoder)).eval()


def audio(seconds: float) -> np.ndarray:
    """Returns noise whose level changes, so that parts have other means than the whole."""
    samples = hiss(round(seconds * RATE), 1)
    return (samples * np.linspace(0.1, 1.0, len(samples))).astype(np.float32)


@pytest.mark.parametrize("seconds", [65.0, 97.03, 330.0])  # the features of the last one are computed in two pieces
def test_an_encoder_that_sees_less_than_the_context_has_the_same_states_in_windows(seconds: float) -> None:
    model = network(att_context_size=((20, 20),), conv_kernel_size=5)
    samples = audio(seconds)
    whole = encode(model, samples, sampling_rate=RATE, window_seconds=1000.0).values
    found = encode(model, samples, sampling_rate=RATE, window_seconds=64.0).values
    assert found.shape == whole.shape
    assert torch.allclose(found, whole, atol=1e-3)


def test_audio_that_is_not_longer_than_a_window_is_encoded_as_a_whole() -> None:
    model, samples = network(), audio(64.0)
    whole = encode(model, samples, sampling_rate=RATE).values
    assert torch.equal(encode(model, samples, sampling_rate=RATE, window_seconds=64.0).values, whole)


def test_a_window_is_at_least_twice_its_context() -> None:
    with pytest.raises(ConfigError, match=r"window_seconds is 63\.0: expected at least 64 s"):
        ExtractConfig(window_seconds=63.0)


def test_the_length_of_a_window_is_a_function_of_the_model() -> None:
    assert {name: round(longest_whole_s(NestConfig.preset(name))) for name in ("small", "large")} == {
        "small": 655,
        "large": 463,
    }
    for name in ("demo", "small", "large"):
        config = NestConfig.preset(name)
        assert needed_bytes(config, 1, 7200.0, longest_whole_s(config)) < 20 << 30


def test_what_does_not_fit_is_refused_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "available_bytes", lambda: 1 << 20)
    with pytest.raises(
        ExtractError, match=r"70 s of audio do not fit into memory \(about .* GB are needed.*--window-seconds"
    ):
        encode(network(), audio(70.0), sampling_rate=RATE)
