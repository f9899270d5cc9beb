from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestdata import Corpus, PrepareConfig
from nestmodel import NestNetwork
from nestmodel.evaluate.calibration import calibrate_batch_norm
from nestmodel.nn.batch_norm import StepBatchNorm
from tests.nestmodel.evaluate.norm_statistics import norm_statistics, norms_of
from tests.own_encoders import Convolutions
from tests.synthesis import folder_corpus, hiss, tone
from tests.training import tiny_config

SECONDS = (0.005, 0.05, 0.3, 0.35, 0.8, 1.1, 1.7, 2.0, 2.0, 2.6)
"""Lengths of the utterances. The first one is too short to be encoded, the second one has one encoder frame."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    audio = {
        f"{i}.wav": hiss(round(16000 * seconds), i, level=0.01) + tone(200.0 * (i + 1), seconds, level=0.03 * i)
        for i, seconds in enumerate(SECONDS)
    }
    return folder_corpus(tmp_path_factory.mktemp("calibration"), audio, PrepareConfig(min_seconds=0.0))


def calibrated(corpus: Corpus, max_batch_seconds: float = 1000.0, rows: Sequence[int] | None = None) -> NestNetwork:
    network = NestNetwork(tiny_config())
    rows = range(len(corpus)) if rows is None else rows
    calibrate_batch_norm(network, corpus, rows, max_batch_seconds, "cpu", on_reject=lambda _: None)
    return network


def inputs_of(norm: StepBatchNorm, network: NestNetwork, corpus: Corpus) -> NDArray[np.float64]:
    """Returns what a norm reads in eval mode: the frames of all utterances, each of which is encoded by itself."""
    frames: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda _, inputs: frames.append(inputs[0]))
    with torch.no_grad():
        for row in range(1, len(corpus)):
            samples = corpus.load(row)[1]
            feats, feat_lens = network.features(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))
            (num_frames,) = network.encoder(feats, feat_lens).lens.tolist()
            frames[-1] = frames[-1][:num_frames]
    hook.remove()
    return torch.cat(frames).double().numpy()


def assert_statistics(norm: StepBatchNorm, mean: NDArray[np.float64], var: NDArray[np.float64]) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    # Rounding of float32 in the encoder, whose frames depend on the shape of the batch by that much.
    np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm.running_var.numpy(), var, rtol=1e-4)


def test_statistics_of_one_batch_are_those_of_all_valid_frames(corpus: Corpus) -> None:
    expected = NestNetwork(tiny_config()).eval()
    for norm, found in zip(norms_of(expected), norms_of(calibrated(corpus)), strict=True):
        frames = inputs_of(norm, expected, corpus)  # of blocks whose norms are calibrated already
        assert len(frames) > 100
        assert_statistics(found, frames.mean(axis=0), frames.var(axis=0))
        norm.load_state_dict(found.state_dict())


@pytest.mark.parametrize("max_batch_seconds", [0.1, 4.0])
def test_batches_count_by_their_frames(corpus: Corpus, max_batch_seconds: float) -> None:
    network = NestNetwork(tiny_config()).eval()
    frames = inputs_of(norms_of(network)[0], network, corpus)
    first, second = norms_of(calibrated(corpus, max_batch_seconds))
    assert_statistics(first, frames.mean(axis=0), frames.var(axis=0))
    assert second.running_var is not None
    assert second.running_var.isfinite().all()


def test_the_same_utterances_give_equal_bits_in_any_order(corpus: Corpus) -> None:
    expected = calibrated(corpus, 4.0).state_dict()
    shuffled = calibrated(corpus, 4.0, rows=[3, 0, 8, 1, 9, 7, 2, 6, 4, 5]).state_dict()
    fewer = calibrated(corpus, 4.0, rows=range(9)).state_dict()
    assert all(torch.equal(values, shuffled[name]) for name, values in expected.items())
    changed = {name for name, values in expected.items() if not torch.equal(values, fewer[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"running_mean", "running_var"}


def test_weights_are_unchanged_and_hooks_are_removed(corpus: Corpus) -> None:
    network, initial = calibrated(corpus), dict(NestNetwork(tiny_config()).named_parameters())
    assert all(torch.equal(values, initial[name]) for name, values in network.named_parameters())
    before = [values.clone() for values in norm_statistics(network)]
    network.eval().encoder(torch.ones(1, 80, 64), torch.tensor([64]))
    assert all(map(torch.equal, norm_statistics(network), before))


def test_statistics_of_an_encoder_of_another_author_are_those_of_all_frames_of_all_batches(corpus: Corpus) -> None:
    network = NestNetwork(tiny_config(), Convolutions())
    (norm,) = norms_of(network)
    frames: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda _, inputs: frames.append(inputs[0].transpose(1, 2).flatten(0, 1)))
    calibrate_batch_norm(network, corpus, range(len(corpus)), 4.0, "cpu", on_reject=lambda _: None)
    hook.remove()
    assert len(frames) > 1
    found = torch.cat(frames).double().numpy()
    assert_statistics(norm, found.mean(axis=0), found.var(axis=0))
    assert network.training
    network.encoder.unused = StepBatchNorm(4)
    calibrate_batch_norm(network, corpus, range(len(corpus)), 4.0, "cpu", on_reject=lambda _: None)
    assert network.encoder.unused.running_var.tolist() == [1.0] * 4
