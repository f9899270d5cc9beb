import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestmodel import ConfigError, FrameProbeConfig, FrameProbeReport, NestNetwork, ProbeError, run_frame_probe
from nestmodel.evaluate.frame_units import cluster_score, majority, mfccs
from nestmodel.evaluate.probe import frames
from nestmodel.evaluate.probe.frame_alignment import align
from nestmodel.evaluate.probe.frame_classifier import LabelledFrames, fit_frames
from nestmodel.evaluate.probe.training import StoppingRule
from tests.extras import needs
from tests.nestmodel.evaluate.probe.spoken_tones import changed, write_manifest
from tests.training import tiny_config

pytestmark = needs("probe", "jiwer", "sklearn")
CONFIG = FrameProbeConfig(num_units=8, max_epochs=5, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the tone sequences `train.json` and `test.json`; nothing reads their texts."""
    folder = tmp_path_factory.mktemp("frames")
    for name, seeds in (("train", range(32)), ("test", range(100, 112))):
        rows = write_manifest(folder, name, seeds)
        changed(folder, rows, {i: {"text": None} for i in range(len(rows))}, name)
    return folder


@pytest.fixture(scope="module")
def model() -> NestNetwork:
    return NestNetwork(replace(tiny_config(), seed=5))


def probe(model: NestNetwork, folder: Path, config: FrameProbeConfig = CONFIG, **settings: Any) -> FrameProbeReport:
    return run_frame_probe(model, [folder / "train.json"], [folder / "test.json"], config, **settings)


@pytest.fixture(scope="module")
def report(model: NestNetwork, folder: Path) -> FrameProbeReport:
    return probe(model, folder, output=folder / "out", model_name="tiny.ckpt")


def test_units_are_predicted_from_log_mels_and_less_well_by_chance(report: FrameProbeReport) -> None:
    (log_mel,) = report.scores("log_mel")
    assert log_mel.accuracy.value > 0.8 > report.chance.value
    assert log_mel.clusters.normalised_information > 0.5
    assert log_mel.clusters.purity > 0.5
    assert [score.layer for score in report.scores("trained")] == [0, 1, 2]
    assert (report.num_training + report.num_held_out, report.num_test) == (32, 12)


def test_differences_compare_the_same_test_frames(report: FrameProbeReport) -> None:
    assert [(difference.layer, difference.baseline) for difference in report.differences] == [
        (layer, baseline) for layer in range(3) for baseline in ("untrained", "log_mel")
    ]
    for difference in report.differences:
        trained = report.scores("trained")[difference.layer].accuracy.value
        layer = difference.layer if difference.baseline == "untrained" else 0
        baseline = report.scores(difference.baseline)[layer].accuracy.value
        assert difference.accuracy.value == pytest.approx(trained - baseline)
        assert difference.accuracy.low <= difference.accuracy.value <= difference.accuracy.high


def test_the_untrained_encoder_has_the_weights_of_the_seed(model: NestNetwork, folder: Path) -> None:
    found = probe(model, folder, replace(CONFIG, seed=5, max_epochs=2))
    assert [score.accuracy for score in found.scores("trained")] == [
        score.accuracy for score in found.scores("untrained")
    ]


def test_equal_seeds_give_equal_results(model: NestNetwork, folder: Path, report: FrameProbeReport) -> None:
    assert probe(model, folder).layers == report.layers


def test_the_result_is_written(folder: Path, report: FrameProbeReport) -> None:
    output = folder / "out"
    assert sorted(path.name for path in output.iterdir()) == [
        *("probe.json", "probe.png", "rejected.jsonl", "rejected_test.jsonl", "report.md")
    ]
    found = json.loads((output / "probe.json").read_text())
    assert (found["kind"], found["task"], found["model"]) == ("probe", "frames", "tiny.ckpt")
    assert found["layers"][1]["accuracy"] == report.layers[1].accuracy._asdict()
    assert found["layers"][1]["clusters"]["purity"] == report.layers[1].clusters.purity
    assert "| log-mel | 0 | " in (output / "report.md").read_text()
    assert (output / "probe.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("factor", [8, 4])
def test_characters_are_predicted_after_forced_alignment(
    factor: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seeds in (("spoken", range(60)), ("spoken_test", range(100, 112))):
        rows = write_manifest(folder, name, seeds)
        changed(folder, rows, {0: {"text": "abcd" * 30}} if name == "spoken" else {1: {"text": "xyz"}}, name)
    labels = []
    aligned = frames.aligned_units
    monkeypatch.setattr(
        frames,
        "aligned_units",
        lambda *caches, **settings: labels.append(settings["labels_per_frame"]) or aligned(*caches, **settings),
    )
    config = tiny_config()
    model = NestNetwork(replace(config, encoder=replace(config.encoder, subsampling_factor=factor)))
    found = run_frame_probe(
        model, [folder / "spoken.json"], [folder / "spoken_test.json"], replace(CONFIG, units="characters")
    )
    assert labels == [factor // 4]  # 25 labels per second
    assert found.alphabet == " abcd"
    assert found.left_out == {"training": {"not_aligned": 1}, "test": {"not_aligned": 1}}
    (log_mel,) = found.scores("log_mel")
    assert log_mel.accuracy.value > 0.6 > found.chance.value


def test_an_alignment_gives_each_frame_the_nearest_character() -> None:
    path = [0, 0, 1, 0, 0, 0, 0, 2, 2, 0, 1]
    log_probs = torch.full((len(path), 3), -10.0)
    log_probs[range(len(path)), path] = 0.0
    assert align(log_probs, [1, 2, 1]).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0]


def test_test_utterances_of_the_training_audio_are_refused(model: NestNetwork, folder: Path) -> None:
    with pytest.raises(ProbeError, match="32 of 32 test utterances are audio of the training utterances"):
        run_frame_probe(model, [folder / "train.json"], [folder / "train.json"], CONFIG)


def test_the_agreement_of_clusters_is_computed_from_frequencies() -> None:
    units = np.array([0, 0, 1, 1])
    assert cluster_score(units, np.array([3, 3, 0, 0])) == pytest.approx((1.0, 1.0))
    assert cluster_score(units, np.array([0, 1, 0, 1])) == pytest.approx((0.0, 0.5))
    # One of four frames is in the wrong cluster: by hand, I = 0.2158 nats and H = ln 2.
    assert cluster_score(units, np.array([0, 0, 0, 1])) == pytest.approx((0.2158 / np.log(2), 0.75), abs=1e-4)


def test_the_unit_of_an_encoder_frame_is_the_most_frequent_one() -> None:
    assert majority(np.array([3, 1, 1, 2, 0, 0, 2]), 3).tolist() == [1, 0, 2]


def test_of_equally_frequent_units_an_encoder_frame_gets_the_first() -> None:
    assert majority(np.array([2, 0, 0, 2, 1]), 2).tolist() == [2, 0, 1]


def test_mfccs_have_differences_over_time() -> None:
    constant = mfccs(torch.ones(20, 80))
    assert constant.shape == (20, 39)
    # The cosine transform of ones is sqrt(80) in the first coefficient; a constant has no differences.
    assert constant[7, :1].tolist() == pytest.approx([80**0.5], rel=1e-5)
    assert constant[:, 1:].abs().max() < 1e-5
    ramp = mfccs(torch.arange(20.0)[:, None] * torch.ones(80))
    assert ramp[10, 13].item() == pytest.approx(80**0.5, rel=1e-5)


def test_a_classifier_learns_separable_frames_and_stops_when_it_no_longer_improves() -> None:
    generator = torch.Generator().manual_seed(0)
    units = torch.randint(0, 4, (2000,), generator=generator)
    values = torch.eye(4)[units] * 1000 + torch.randn(2000, 4, generator=generator)
    frames = LabelledFrames(values=values, units=units)
    rule = StoppingRule(max_epochs=10, patience=2)
    fitted = fit_frames(frames, frames, 4, rule, seed=0)
    assert (fitted.predict(values) == units).all()
    assert fitted.training.num_epochs == fitted.training.best_epoch + 2
    assert fitted.training.num_steps == fitted.training.num_epochs * 4
    assert fitted.training.held_out_error == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_units": 1}, "num_units is 1: expected 2 or more"),
        ({"held_out": 0.0}, "held_out is 0.0"),
        ({"max_epochs": 0}, "max_epochs is 0"),
        ({"patience": 0}, "patience is 0"),
        ({"max_batch_seconds": 0.0}, "max_batch_seconds is 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrameProbeConfig(**settings)
