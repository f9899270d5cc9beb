"""Comparison of a tiny model with the outputs of NeMo 2.7, array by array, in float32 on a CPU.

`nemo_tiny.npz` was written by NeMo. It holds the configuration with the version of NeMo, all weights, and the inputs
and outputs of one pass. Noisy audio is the sum of its `clean` and `noise`, 16-bit samples divided by 32768. Tolerances
are absolute for features, and relative to the largest magnitude of the array otherwise.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nestmodel import NestConfig, NestNetwork, config_from_nemo
from nestmodel.nn.features import Preprocessor
from nestmodel.nn.loss_stats import loss_stats


@pytest.fixture(scope="module")
def golden() -> Mapping[str, Any]:
    with np.load(Path(__file__).parent / "nemo_tiny.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def config(golden: Mapping[str, Any]) -> NestConfig:
    return config_from_nemo(json.loads(str(golden["config"])))


@pytest.fixture(scope="module")
def model(golden: Mapping[str, Any], config: NestConfig) -> NestNetwork:
    nest = NestNetwork(config).eval()
    prefix = "state/"
    state = {key.removeprefix(prefix): torch.from_numpy(golden[key]) for key in golden if key.startswith(prefix)}
    nest.load_state_dict(state, strict=True)
    return nest


def audio_of(golden: Mapping[str, Any], *names: str) -> Tensor:
    return torch.from_numpy(sum(golden[name].astype(np.float32) / 32768 for name in names))


def largest_error(actual: Tensor, expected: np.ndarray[Any, Any], *, relative: bool) -> float:
    assert actual.shape == expected.shape
    error = np.abs(actual.detach().numpy() - expected).max()
    return float(error / np.abs(expected).max() if relative else error)


def test_window_and_filterbank_are_equal(golden: Mapping[str, Any], config: NestConfig) -> None:
    featurizer = Preprocessor(config.features).featurizer
    assert torch.equal(featurizer.window, torch.from_numpy(golden["state/preprocessor.featurizer.window"]))
    assert largest_error(featurizer.fb, golden["state/preprocessor.featurizer.fb"], relative=False) < 1e-7


def test_features_of_clean_and_noisy_audio_in_one_call_are_equal(golden: Mapping[str, Any], model: NestNetwork) -> None:
    audio = torch.cat([audio_of(golden, "clean"), audio_of(golden, "clean", "noise")])
    feats, feat_lens = model.preprocessor(audio, torch.from_numpy(golden["lengths"]).repeat(2))
    clean, noisy = feats.chunk(2)
    assert largest_error(clean, golden["features_clean"], relative=False) < 1e-5
    assert largest_error(noisy, golden["features_noisy"], relative=False) < 1e-5
    assert feat_lens.tolist() == [*golden["features_len"], *golden["features_len"]]


def test_tokens_are_equal_on_every_valid_frame(golden: Mapping[str, Any], model: NestNetwork) -> None:
    clean, _ = model.preprocessor(audio_of(golden, "clean"), torch.from_numpy(golden["lengths"]))
    tokens = model.quantizer(clean)
    for utterance, num_valid in enumerate(golden["encoded_len"]):
        expected = golden["tokens"][utterance, :num_valid]
        assert np.array_equal(tokens[utterance, :num_valid].numpy(), expected)


def test_masked_features_are_equal(golden: Mapping[str, Any], model: NestNetwork) -> None:
    noisy = torch.from_numpy(golden["features_noisy"])
    masked = model.mask_processor.apply_mask(noisy, torch.from_numpy(golden["mask"]).bool())
    assert np.array_equal(masked.numpy(), golden["masked_features"])


def test_encoder_frames_and_log_probabilities_are_equal(golden: Mapping[str, Any], model: NestNetwork) -> None:
    encoded, enc_lens = model.encoder(
        torch.from_numpy(golden["masked_features"]), torch.from_numpy(golden["features_len"])
    )
    assert largest_error(encoded.transpose(1, 2), golden["encoded"], relative=True) < 1e-5
    assert enc_lens.tolist() == golden["encoded_len"].tolist()
    assert largest_error(model.decoder(encoded), golden["log_probs"], relative=True) < 1e-5


def test_loss_computed_from_audio_is_equal(golden: Mapping[str, Any], model: NestNetwork) -> None:
    lengths, is_masked = torch.from_numpy(golden["lengths"]), torch.from_numpy(golden["mask"]).bool()
    clean, _ = model.preprocessor(audio_of(golden, "clean"), lengths)
    noisy, feat_lens = model.preprocessor(audio_of(golden, "clean", "noise"), lengths)
    stats = loss_stats(model.forward_features(clean, noisy, feat_lens, is_masked))
    assert int(stats.num_tokens) == 18
    assert float(stats.loss.detach()) == pytest.approx(float(golden["loss"]), rel=1e-5)


def test_predict_gives_equal_log_probabilities(golden: Mapping[str, Any], model: NestNetwork) -> None:
    masked = torch.from_numpy(golden["masked_features"])
    log_probs, enc_lens = model.predict(masked, torch.from_numpy(golden["features_len"]))
    assert largest_error(log_probs, golden["log_probs"], relative=True) < 1e-5
    assert enc_lens.tolist() == golden["encoded_len"].tolist()
