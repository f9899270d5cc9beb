import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nestmodel import CtcProbeConfig, CtcProbeReport, NestNetwork, ProbeError, run_ctc_probe
from nestmodel.evaluate.ctc_head import CtcHead, fits, num_labels_per_frame
from tests.extras import needs
from tests.nestmodel.evaluate.spoken_tones import changed, write_manifest
from tests.training import tiny_config

pytestmark = needs("probe", "jiwer")
FAST = CtcProbeConfig(learning_rates=(0.3,), max_epochs=8, probe_seeds=(0, 1), device="cpu")
SHORT = replace(FAST, learning_rates=(0.1,), max_epochs=2, probe_seeds=(0,))
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tones")


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rows:
    return write_manifest(folder, "train", range(80))


@pytest.fixture(scope="module")
def test_rows(folder: Path) -> Rows:
    return write_manifest(folder, "test", range(100, 116))


@pytest.fixture(scope="module")
def model() -> NestNetwork:
    return NestNetwork(replace(tiny_config(), seed=5))


def probe(
    model: NestNetwork, folder: Path, config: CtcProbeConfig, train: str = "train", test: str = "test", **settings: Any
) -> CtcProbeReport:
    return run_ctc_probe(model, [folder / f"{train}.json"], [folder / f"{test}.json"], config, **settings)


@pytest.fixture(scope="module")
def report(model: NestNetwork, folder: Path, rows: Rows, test_rows: Rows) -> CtcProbeReport:
    assert (len(rows), len(test_rows)) == (80, 16)
    return probe(model, folder, FAST, output=folder / "out", model_name="tiny.ckpt")


def test_content_that_is_in_the_log_mels_is_recognised(report: CtcProbeReport) -> None:
    assert report.score("log_mel").characters.rate < 0.1
    assert report.alphabet == " abcd"
    assert (report.num_training + report.num_held_out, report.num_held_out, report.num_test) == (80, 8, 16)
    assert report.num_too_fast == {"training": 0, "test": 0}


@pytest.mark.slow
@pytest.mark.usefixtures("test_rows")
def test_texts_that_are_not_in_the_audio_are_not_recognised(model: NestNetwork, folder: Path, rows: Rows) -> None:
    shuffled = {i: {"text": rows[(i + 37) % len(rows)]["text"]} for i in range(len(rows))}
    changed(folder, rows, shuffled, "shuffled")
    found = probe(model, folder, replace(FAST, learning_rates=(0.1,), max_epochs=15, probe_seeds=(0,)), "shuffled")
    assert min(score.characters.rate for score in found.contestants) > 0.5


def test_the_result_is_written(folder: Path, report: CtcProbeReport) -> None:
    output = folder / "out"
    assert sorted(path.name for path in output.iterdir()) == [
        *("hypotheses.jsonl", "probe.json", "rejected.jsonl", "rejected_test.jsonl")
    ]
    found = json.loads((output / "probe.json").read_text())
    assert (found["kind"], found["task"], found["model"], found["alphabet"]) == ("probe", "ctc", "tiny.ckpt", " abcd")
    assert len(found["normalisation"]) == 4
    assert found["contestants"][2]["characters"] == report.score("log_mel").characters._asdict()
    assert found["differences"][0]["characters"] == report.differences[0].characters._asdict()
    lines = [json.loads(line) for line in (output / "hypotheses.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    assert all(line["log_mel"].keys() == {"0", "1"} for line in lines)


def test_a_learning_rate_at_the_edge_of_the_grid_is_named(report: CtcProbeReport) -> None:
    """A rate that is too high for one kind of features looks like content of the other."""
    best = {"trained": 0.02, "untrained": 0.005, "log_mel": 0.08}
    contestants = [replace(score, learning_rate=best[score.name]) for score in report.contestants]
    config = replace(report.config, learning_rates=(0.005, 0.02, 0.08))
    assert replace(report, config=config, contestants=contestants).at_an_edge == ["untrained", "log_mel"]


def test_unusable_texts_are_listed_and_fast_speech_is_counted(
    model: NestNetwork, folder: Path, rows: Rows, test_rows: Rows, tmp_path: Path
) -> None:
    changed(folder, rows, {0: {"text": None}, 1: {"text": "?!"}, 2: {"text": "abcd" * 30}}, "some")
    changed(folder, test_rows, {0: {"text": "abx"}, 1: {"text": "dcba" * 30}, 2: {"text": ""}}, "some_test")
    found = probe(model, folder, SHORT, "some", "some_test", output=tmp_path / "out")
    assert found.left_out == {"training": {"no_text": 1, "empty_text": 1}, "test": {"no_text": 1}}
    assert found.num_too_fast == {"training": 1, "test": 1}
    assert (found.num_training + found.num_held_out, found.num_test) == (77, 15)
    (line,) = (tmp_path / "out" / "rejected_test.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "no_text"


@pytest.mark.slow
def test_unusable_input_is_refused(model: NestNetwork, folder: Path, rows: Rows, test_rows: Rows) -> None:
    changed(folder, rows, {i: {"text": None} for i in range(80)}, "mute")
    with pytest.raises(ProbeError, match=r"no training utterance has text\. Give a manifest with the field `text`"):
        probe(model, folder, SHORT, "mute")
    changed(folder, test_rows, {3: {"audio_filepath": rows[7]["audio_filepath"]}}, "shared")
    with pytest.raises(ProbeError, match=r"1 of 16 test utterances are audio of the training utterances \(train/007\)"):
        probe(model, folder, SHORT, test="shared")
    changed(folder, rows[:9], {}, "few")
    with pytest.raises(ProbeError, match=r"9 utterances for training and 16 for the test can be used: .* least 10"):
        probe(model, folder, SHORT, "few")
    with pytest.raises(ProbeError, match=r"group_by is 'house', and no training utterance has that field"):
        probe(model, folder, replace(SHORT, group_by="house"))
    changed(folder, rows, {i: {"take": 1} for i in range(80)}, "one_take")
    with pytest.raises(ProbeError, match="80 training utterances are of one group, 'group 1', and cannot be split"):
        probe(model, folder, replace(SHORT, group_by="take"), "one_take")


def test_a_head_predicts_several_labels_from_each_frame_in_order() -> None:
    head = CtcHead(torch.zeros(2, 3), torch.ones(2, 3), num_labels=4, labels_per_frame=2, seed=0)
    with torch.no_grad():
        head.linear.weight.zero_()
        head.linear.bias.copy_(torch.tensor([0.0, 9, 0, 0, 0, 0, 9, 0]))
    assert head(torch.zeros(3, 2, 3)).argmax(dim=1).tolist() == [1, 2, 1, 2, 1, 2]


def test_at_least_25_labels_are_predicted_per_second(report: CtcProbeReport) -> None:
    assert [num_labels_per_frame(rate) for rate in (6.25, 10.0, 12.5, 25.0, 50.0)] == [4, 3, 2, 1, 1]
    assert (report.frame_rate_hz, report.labels_per_frame) == (12.5, 2)


def test_repeated_characters_need_a_blank_between_them() -> None:
    assert fits("aabb", 6)
    assert not fits("aabb", 5)
    assert fits("abab", 4)
