from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestdata import Corpus
from nestmodel import ConfigError, FeatureScoreConfig, NestNetwork, ProbeError, score_features
from nestmodel.evaluate.feature_scores import MAX_RANK_FRAMES, kappa, rankme, score_names
from tests.extras import needs
from tests.training import tiny_config

CONFIG = FeatureScoreConfig(seconds=60.0, num_units=8, layers=[0, 2])


@pytest.fixture(scope="module")
def model() -> NestNetwork:
    return NestNetwork(replace(tiny_config(), seed=5)).eval()


def test_rankme_is_the_number_of_directions_that_are_used_equally() -> None:
    axes = np.eye(6, dtype=np.float32)
    assert rankme(axes[[0, 1, 2, 0, 1, 2]]) == pytest.approx(3.0)
    assert rankme(np.ones((9, 6), np.float32)) == pytest.approx(1.0)
    shares = np.array([0.9, 0.1])
    assert rankme(np.diag(shares).astype(np.float32)) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_rankme_depends_neither_on_the_scale_nor_on_the_order_of_frames(seed: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((20, 5)).astype(np.float32)
    changed = np.float32(scale) * generator.permutation(features)
    assert rankme(changed) == pytest.approx(rankme(features), rel=1e-5)
    assert 1.0 <= rankme(features) <= 5.0 + 1e-9


def test_rankme_counts_a_fixed_number_of_frames() -> None:
    features = np.random.default_rng(0).standard_normal((3 * MAX_RANK_FRAMES, 4)).astype(np.float32)
    assert rankme(features) != rankme(features[: 2 * MAX_RANK_FRAMES])
    assert rankme(features) == rankme(features.copy())


def test_kappa_corrects_agreement_for_chance() -> None:
    numbers = np.array([0, 0, 1, 1])
    assert kappa(numbers, numbers) == 1.0
    assert kappa(numbers, np.array([0, 1, 0, 1])) == 0.0  # half of them agree, as independent ones would
    assert kappa(numbers, 1 - numbers) == -1.0
    assert kappa(np.zeros(4, np.int64), np.zeros(4, np.int64)) == 0.0


@needs("probe", "sklearn")
def test_scores_are_those_of_the_chosen_layers_and_equal_in_every_call(model: NestNetwork, demo_speech: Path) -> None:
    corpus, state = Corpus.open(demo_speech), torch.random.get_rng_state()
    scores = score_features(model, corpus, None, CONFIG)
    assert list(scores) == score_names([0, 2])
    assert scores == score_features(model, corpus, None, CONFIG)
    assert torch.equal(torch.random.get_rng_state(), state)
    for layer in (0, 2):
        assert 1 < scores[f"rankme_layer{layer}"] < 16
        assert 0 < scores[f"pnmi_layer{layer}"] < 1
        assert 0 < scores[f"kappa_layer{layer}"] < scores[f"agreement_layer{layer}"] < 1
    assert 0 < scores["agreement_tokens"] <= 1


@needs("probe", "sklearn")
def test_a_causal_encoder_is_scored_on_as_many_frames_as_there_are_units(demo_speech: Path) -> None:
    causal = NestNetwork(tiny_config(causal_downsampling=True)).eval()
    scores = score_features(causal, Corpus.open(demo_speech), None, replace(CONFIG, seconds=20.0))
    assert 0 < scores["pnmi_layer0"] < 1


@needs("probe", "sklearn")
def test_clusters_agree_less_in_louder_noise(model: NestNetwork, demo_speech: Path) -> None:
    corpus = Corpus.open(demo_speech)
    by_snr = [score_features(model, corpus, None, replace(CONFIG, snr_db=snr_db)) for snr_db in (60.0, 20.0, -20.0)]
    kappas = [scores["kappa_layer0"] for scores in by_snr]
    assert kappas == sorted(kappas, reverse=True)
    assert len({scores["pnmi_layer0"] for scores in by_snr}) == 1  # of the clean audio alone


@needs("probe", "sklearn")
def test_audio_with_too_few_frames_is_refused(model: NestNetwork, demo_speech: Path) -> None:
    with pytest.raises(ProbeError, match=r"too few frames for 500 units\. Raise FeatureScores\.config\.seconds"):
        score_features(model, Corpus.open(demo_speech), None, replace(CONFIG, seconds=5.0, num_units=500))


@pytest.mark.parametrize(("setting", "value"), [("seconds", 0.0), ("num_units", 1)])
def test_settings_out_of_range_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"FeatureScores\.config\.{setting} is {value:g}: give"):
        FeatureScoreConfig(**{setting: value})
