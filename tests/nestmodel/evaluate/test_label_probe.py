import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestdata import OutputError
from nestmodel import NestModel, NestNetwork, ProbeConfig, ProbeError, ProbeReport, ProbeScore, run_probe
from nestmodel.evaluate.calibration import calibrate_batch_norm
from tests.extras import needs
from tests.nestmodel.evaluate.norm_statistics import norm_statistics
from tests.synthesis import Samples, hiss, tone, write_audio, write_jsonl
from tests.training import tiny_config

pytestmark = needs("probe", "sklearn")
NUM = 48
Rows = list[dict[str, Any]]


def burst(hz: range, seed: int) -> Samples:
    """Returns noise with tones in its second half: a label in the signal that normalisation does not remove."""
    audio = hiss(9600, seed, level=0.001)
    audio[4800:] += sum(tone(each, 0.3, level=0.01) for each in hz)
    return audio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the audio and the manifests; relative paths make ids, and so the split, equal in every run."""
    return tmp_path_factory.mktemp("probe")


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rows:
    """Lines of a manifest: `pitch` is in the signal, `coin` is not; four cuts with one pitch share a `room`."""
    coins = np.random.default_rng(1).permutation(NUM) % 2
    for i in range(NUM):
        write_audio(folder / f"{i:02d}.wav", burst((range(100, 1800, 50), range(2000, 7000, 150))[i % 2], i))
    return [
        {
            "audio_filepath": f"{i:02d}.wav",
            "pitch": ("low", "high")[i % 2],
            "coin": ("head", "tail")[coins[i]],
            "room": f"room {i % 2}-{i // 8}",
            "speaker": f"speaker {i // 16}",
        }
        for i in range(NUM)
    ]


@pytest.fixture
def manifest(rows: Rows, folder: Path) -> Path:
    return write_jsonl(folder / "speech.json", rows)


@pytest.fixture(scope="module")
def model() -> NestModel:
    return NestModel(replace(tiny_config(), seed=5))


def probe(
    model: NestModel, manifest: Path, label: str = "pitch", output: Path | None = None, **settings: Any
) -> ProbeReport:
    return run_probe(model, [manifest], ProbeConfig(label=label, device="cpu", **settings), output)


def test_a_label_in_the_signal_is_predicted_from_all_features(model: NestModel, manifest: Path) -> None:
    report = probe(model, manifest)
    assert min(score.accuracy for score in (report.trained, report.untrained)) > 0.9
    assert report.log_mel.accuracy == 1.0
    assert report.chance.accuracy == 0.5
    assert report.classes == {"high": (18, 6), "low": (18, 6)}
    assert (report.num_train, report.num_held_out, report.num_unlabelled) == (36, 12, 0)


@pytest.mark.slow
def test_a_label_that_is_not_in_the_signal_is_predicted_at_chance_level(model: NestModel, manifest: Path) -> None:
    # The mean over four splits: in a single split, one score in twenty is outside its 95 % interval.
    reports = [probe(model, manifest, "coin", held_out=0.5, seed=seed) for seed in range(4)]
    scores = [(report.trained.accuracy, report.untrained.accuracy, report.log_mel.accuracy) for report in reports]
    accuracy = np.mean(scores, axis=0)
    assert 0.3 < accuracy.min() <= accuracy.max() < 0.7


def test_the_untrained_encoder_has_the_initial_weights_of_training(manifest: Path) -> None:
    """Shown with layer norm: an encoder without batch norm is not calibrated."""
    config = tiny_config(conv_norm="layer_norm")
    report = probe(NestModel(replace(config, seed=5)), manifest, "coin", seed=5)
    assert report.trained == report.untrained


def test_batch_norm_of_the_untrained_encoder_is_calibrated_on_the_training_side_only(
    model: NestModel, rows: Rows, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated = []

    def record(network: NestNetwork, *arguments: Any, **options: Any) -> None:
        calibrate_batch_norm(network, *arguments, **options)
        calibrated.append(network)

    monkeypatch.setattr("nestmodel.evaluate.probe.calibrate_batch_norm", record)
    for name, changed_speakers in (("a", ()), ("b", ("speaker 1",)), ("c", ("speaker 0", "speaker 2"))):
        changed = [dict(row) for row in rows]
        for i, row in enumerate(changed):
            if row["speaker"] in changed_speakers:
                row["audio_filepath"] = f"other-{i:02d}.wav"
                write_audio(folder / row["audio_filepath"], burst(range(50, 7000, 50), i))
        probe(model, write_jsonl(folder / f"{name}.json", changed), held_out_where="speaker=speaker 1")
    same, held_out_changed, training_changed = map(norm_statistics, calibrated)
    initial = norm_statistics(NestNetwork(tiny_config()))
    assert len(same) == 4
    assert all(map(torch.equal, same, held_out_changed))
    assert not any(map(torch.equal, same, training_changed))
    assert not any(map(torch.equal, same, initial))


def test_groups_stay_together_and_utterances_without_a_group_are_excluded(
    model: NestModel, rows: Rows, folder: Path
) -> None:
    ungrouped = [{key: value for key, value in row.items() if key != "room"} for row in rows[:2]]
    report = probe(model, write_jsonl(folder / "a.json", [*ungrouped, *rows[2:]]), group_by="room")
    assert report.num_unlabelled == 2
    # Rooms have four cuts, except for two rooms of three.
    assert all(held in (7, 8, 4, 3) for _, held in report.classes.values())
    with pytest.raises(ProbeError, match=r"0 of 3 classes can be probed, .*'speaker 0': none held out"):
        probe(model, write_jsonl(folder / "b.json", rows), "speaker", group_by="speaker")


def test_a_field_and_its_value_can_define_the_held_out_side(model: NestModel, manifest: Path) -> None:
    report = probe(model, manifest, held_out_where="speaker=speaker 1", train_per_class=4)
    assert report.classes == {"high": (4, 8), "low": (4, 8)}
    with pytest.raises(ProbeError, match="'high': none held out"):
        probe(model, manifest, held_out_where="speaker=nobody")


def test_small_classes_are_named_and_utterances_without_the_label_are_counted(
    model: NestModel, rows: Rows, folder: Path
) -> None:
    changed = [dict(row) for row in rows[:30]]
    for number, label in ((0, "once"), (1, "twice"), (2, "twice"), (3, None), (4, ""), (5, ["high"])):
        changed[number]["pitch"] = label
    del changed[6]["pitch"]
    report = probe(model, write_jsonl(folder / "a.json", changed))
    assert report.classes == {"high": (9, 3), "low": (8, 3)}
    assert report.chance == ProbeScore.from_counts(3, 6)
    assert report.num_unlabelled == 4
    assert report.excluded_classes == {"once": "1 in training, 2 are needed", "twice": "1 in training, 2 are needed"}


def test_the_result_is_written_completely_or_not_at_all(model: NestModel, manifest: Path, tmp_path: Path) -> None:
    output, config = tmp_path / "out", ProbeConfig(label="pitch", device="cpu", train_per_class=4)

    def stop(done: int, total: int | None) -> None:
        if done == total and done > NUM:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_probe(model, [manifest], config, output, on_progress=stop)
    assert not output.exists()
    report = run_probe(model, [manifest], config, output, model_name="tiny.ckpt")
    assert sorted(path.name for path in output.iterdir()) == ["probe.json", "rejected.jsonl"]
    found = json.loads((output / "probe.json").read_text())
    assert (found["model"], found["config"]["label"]) == ("tiny.ckpt", "pitch")
    assert found["classes"] == {"high": [4, 6], "low": [4, 6]}
    assert found["trained"] == report.trained._asdict()
    with pytest.raises(OutputError, match=r"out: exists already.*--overwrite"):
        run_probe(model, [manifest], config, output)
    run_probe(model, [manifest], config, output, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "tempo"}, r"label is 'tempo', and no utterance has that label\. The labels here: .*pitch \(48\)"),
        ({"label": "room", "held_out": 0.8}, "0 of 12 classes can be probed, and two are needed .*Give more"),
    ],
)
def test_unusable_labels_are_an_error_with_the_reason(
    settings: dict[str, Any], message: str, model: NestModel, manifest: Path, tmp_path: Path
) -> None:
    with pytest.raises(ProbeError, match=message):
        run_probe(model, [manifest], ProbeConfig(device="cpu", **settings), tmp_path / "out")
    assert not list(tmp_path.iterdir())
