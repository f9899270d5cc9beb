"""Comparison of a tiny model with the outputs of NeMo 3.0.0, and of its features with a double-precision reference.

`nemo_tiny.npz` was written by NeMo (`benchmarks/peers/nemo_golden.py`). It holds the configuration with the version of
NeMo, all weights, and the float32 inputs and outputs of one pass on a CPU. Noisy audio is the sum of its `clean` and
`noise`, 16-bit samples divided by 32768. The tolerances hold on every x86 CPU:

- Features in double precision equal `reference_features`, which is written with numpy, to 1e-9.
- Features in float32, computed here or stored, are within 2e-4 of that reference. Rounding errors of a float32 Fourier
  transform show in mel bins of little energy: the stored features are 1.04e-4 from the reference, and on an Intel CPU
  both NeMo's features and ours were 9.3e-5 from the stored ones. The root mean square of the error is 2e-6.
- Tokens, masks and lengths are equal.
- The encoder, the log-probabilities and the loss are within 1e-5 of the largest magnitude, some hundred roundings of
  6e-8. Instruction sets change them by up to 5e-7 (docs/supported-versions.md).
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestmodel import NestConfig, NestNetwork, config_from_nemo
from nestmodel.nn.features import LOG_OFFSET, STD_OFFSET, LogMelFeatures
from nestmodel.nn.loss import loss_stats
from nestmodel.nn.quantizer import RandomProjectionQuantizer

FLOAT32_FEATURES = 2e-4
FLOAT32_FEATURES_RMS = 1e-5


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


def largest_error(actual: Tensor, expected: NDArray[Any], *, relative: bool) -> float:
    assert actual.shape == expected.shape
    error = np.abs(actual.detach().numpy() - expected).max()
    return float(error / np.abs(expected).max() if relative else error)


def test_window_and_filterbank_are_equal(golden: Mapping[str, Any], config: NestConfig) -> None:
    featurizer = LogMelFeatures(config.features)
    assert torch.equal(featurizer.window, torch.from_numpy(golden["state/preprocessor.featurizer.window"]))
    assert largest_error(featurizer.fb, golden["state/preprocessor.featurizer.fb"], relative=False) < 1e-7


def reference_features(audio: NDArray[np.float64], num_samples: int, model: NestNetwork) -> NDArray[np.float64]:
    """Returns the normalised log-mel frames of one utterance, shape (mels, valid frames), computed in float64.

    The window and the mel weights are those of the model, which are stored in float32.
    """
    featurizer, config = model.features, model.config.features
    audio = np.where(np.arange(len(audio)) < num_samples, audio, 0.0)
    audio = np.concatenate([audio[:1], audio[1:] - config.preemphasis * audio[:-1]])
    audio[num_samples:] = 0.0
    padded = np.pad(audio, config.n_fft // 2)
    margin = (config.n_fft - config.window_length) // 2
    window = np.pad(featurizer.window.double().numpy(), margin)
    num_frames = num_samples // config.hop_length
    frames = np.stack([padded[i * config.hop_length :][: config.n_fft] * window for i in range(num_frames)], axis=1)
    power = np.abs(np.fft.rfft(frames, axis=0)) ** 2
    log_mels = np.log(featurizer.fb[0].double().numpy() @ power + LOG_OFFSET)
    centred = log_mels - log_mels.mean(axis=1, keepdims=True)
    normalised: NDArray[np.float64] = centred / (log_mels.std(axis=1, ddof=1, keepdims=True) + STD_OFFSET)
    return normalised


@pytest.fixture(scope="module")
def references(golden: Mapping[str, Any], model: NestNetwork) -> NDArray[np.float64]:
    """Features of the clean utterances, then of the noisy ones, zero past their valid frames."""
    audio = torch.cat([audio_of(golden, "clean"), audio_of(golden, "clean", "noise")]).double().numpy()
    found = np.zeros((len(audio), *golden["features_clean"].shape[1:]))
    for row, samples, num_samples in zip(found, audio, [*golden["lengths"]] * 2, strict=True):
        feats = reference_features(samples, int(num_samples), model)
        row[:, : feats.shape[1]] = feats
    return found


def test_features_in_double_precision_equal_the_reference(
    golden: Mapping[str, Any], model: NestNetwork, references: NDArray[np.float64]
) -> None:
    audio = torch.cat([audio_of(golden, "clean"), audio_of(golden, "clean", "noise")]).double()
    featurizer = deepcopy(model.features).double()
    feats, feat_lens = featurizer(audio, torch.from_numpy(golden["lengths"]).repeat(2))
    assert largest_error(feats, references, relative=False) < 1e-9
    assert feat_lens.tolist() == [*golden["features_len"], *golden["features_len"]]


def test_features_in_float32_are_within_rounding_of_the_reference(
    golden: Mapping[str, Any], model: NestNetwork, references: NDArray[np.float64]
) -> None:
    audio = torch.cat([audio_of(golden, "clean"), audio_of(golden, "clean", "noise")])
    feats, feat_lens = model.features(audio, torch.from_numpy(golden["lengths"]).repeat(2))
    assert feat_lens.tolist() == [*golden["features_len"], *golden["features_len"]]
    stored = np.concatenate([golden["features_clean"], golden["features_noisy"]])
    for found in (feats, torch.from_numpy(stored)):
        assert largest_error(found, references, relative=False) < FLOAT32_FEATURES
        assert np.sqrt(np.square(found.numpy() - references).mean()) < FLOAT32_FEATURES_RMS


def test_tokens_are_equal_on_every_valid_frame(golden: Mapping[str, Any], model: NestNetwork) -> None:
    clean, _ = model.features(audio_of(golden, "clean"), torch.from_numpy(golden["lengths"]))
    tokens = model.quantizer(clean)
    for utterance, num_valid in enumerate(golden["encoded_len"]):
        expected = golden["tokens"][utterance, :num_valid]
        assert np.array_equal(tokens[utterance, :num_valid].numpy(), expected)


def reference_tokens(
    feats: NDArray[np.float64], model: NestNetwork, input_norm: str
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the tokens of the frames (mels, frames) of an utterance with a norm of NEST v2, computed in float64.

    The second array tells how much nearer the code of a token is than the next one, as a difference of cosines.
    """
    quantizer = model.quantizer
    weight, codes = (tensor.double().numpy() for tensor in (quantizer.proj.weight, quantizer.codebooks[0]))
    factor = weight.shape[1] // len(feats)
    stacks = np.stack([feats[:, i : i + factor].T for i in range(0, feats.shape[1], factor)])  # (tokens, frames, mels)
    axes: int | tuple[int, int] = 2 if input_norm == "frames" else (1, 2)
    normalised = stacks - stacks.mean(axes, keepdims=True)
    normalised /= np.sqrt(stacks.var(axes, keepdims=True) + 1e-5)
    points = normalised.reshape(len(stacks), -1) @ weight.T
    cosines = points @ codes.T / (np.linalg.norm(points, axis=1, keepdims=True) * np.linalg.norm(codes, axis=1))
    best = np.sort(cosines, axis=1)
    return cosines.argmax(axis=1), best[:, -1] - best[:, -2]


@pytest.mark.parametrize("input_norm", ["frames", "stacked"])
def test_tokens_of_nest_v2_equal_a_reference_in_double_precision(
    golden: Mapping[str, Any], model: NestNetwork, input_norm: Literal["frames", "stacked"]
) -> None:
    """No release of NeMo computes them, so the golden features and weights meet the formula instead."""
    config = replace(model.config.quantizer, input_norm=input_norm)
    quantizer = RandomProjectionQuantizer(config, dim=model.config.features.num_mels, num_stacked=8)
    quantizer.load_state_dict(model.quantizer.state_dict())
    tokens = quantizer(torch.from_numpy(golden["features_clean"]))
    num_changed = 0
    for utterance, num_valid in enumerate(golden["encoded_len"]):
        feats = golden["features_clean"][utterance, :, : 8 * num_valid].astype(np.float64)
        expected, margins = reference_tokens(feats, model, input_norm)
        assert margins.min() > 1e-4  # some thousand roundings of float32
        assert np.array_equal(tokens[utterance, :num_valid, 0].numpy(), expected)
        num_changed += int((expected != golden["tokens"][utterance, :num_valid, 0]).sum())
    assert num_changed > 0


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
    clean, _ = model.features(audio_of(golden, "clean"), lengths)
    noisy, feat_lens = model.features(audio_of(golden, "clean", "noise"), lengths)
    stats = loss_stats(model.forward_features(clean, noisy, feat_lens, is_masked))
    assert int(stats.num_tokens) == 18
    assert float(stats.loss.detach()) == pytest.approx(float(golden["loss"]), rel=1e-5)
