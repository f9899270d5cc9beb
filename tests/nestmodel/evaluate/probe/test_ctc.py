import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from nestdata import OutputError
from nestmodel import ConfigError, CtcProbeConfig, CtcProbeReport, NestNetwork, ProbeError, run_ctc_probe
from nestmodel.evaluate.probe.ctc_head import CtcHead, default_labels_per_frame, fits
from nestmodel.evaluate.probe.ctc_markdown import markdown
from tests.extras import needs
from tests.nestmodel.evaluate.probe.spoken_tones import changed, write_manifest
from tests.training import tiny_config

pytestmark = needs("probe", "jiwer")
FAST = CtcProbeConfig(learning_rates=(0.03, 0.1), max_epochs=20, patience=8, probe_seeds=(0, 1), device="cpu")
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
    assert report.unknown_characters == {}
    assert (report.num_training + report.num_held_out, report.num_held_out, report.num_test) == (80, 8, 16)
    assert report.num_too_fast == {"training": 0, "test": 0}


def test_texts_that_are_not_in_the_audio_are_not_recognised(model: NestNetwork, folder: Path, rows: Rows) -> None:
    shuffled = {i: {"text": rows[(i + 37) % len(rows)]["text"]} for i in range(len(rows))}
    changed(folder, rows, shuffled, "shuffled")
    found = probe(model, folder, replace(FAST, learning_rates=(0.1,), max_epochs=15, probe_seeds=(0,)), "shuffled")
    assert min(score.characters.rate for score in found.contestants) > 0.5


def test_every_contestant_is_trained_by_the_same_rule(report: CtcProbeReport) -> None:
    assert [score.name for score in report.contestants] == ["trained", "untrained", "log_mel"]
    for score in report.contestants:
        assert list(score.held_out_error_rates) == [0.03, 0.1]
        assert score.learning_rate == min(score.held_out_error_rates, key=score.held_out_error_rates.__getitem__)
        rates = [result.held_out_error_rate for result in score.seeds]
        assert score.held_out_error_rates[score.learning_rate] == pytest.approx(sum(rates) / 2)
        assert [result.seed for result in score.seeds] == [0, 1]
        for result in score.seeds:
            assert result.num_epochs == min(FAST.max_epochs, result.best_epoch + FAST.patience)
            assert result.num_steps == result.num_epochs * 5  # 72 utterances in batches of 16
            assert sum(result.layer_weights) == pytest.approx(1.0, abs=1e-5)
        total = sum(result.characters.substitutions for result in score.seeds)
        assert score.characters.substitutions == total
    assert [len(score.seeds[0].layer_weights) for score in report.contestants] == [3, 3, 1]
    assert report.score("log_mel").num_parameters == 1 + (640 + 1) * 2 * 6


def test_differences_are_those_of_the_rates(report: CtcProbeReport) -> None:
    for difference in report.differences:
        rates = [report.score(name).characters.rate for name in ("trained", difference.baseline)]
        assert difference.characters.value == pytest.approx(rates[0] - rates[1])
        assert difference.characters.low <= difference.characters.value <= difference.characters.high
        assert len(difference.characters_by_seed) == 2
    assert [difference.baseline for difference in report.differences] == ["untrained", "log_mel"]


def test_the_untrained_encoder_has_initial_weights(model: NestNetwork, folder: Path, report: CtcProbeReport) -> None:
    assert report.score("trained").characters != report.score("untrained").characters  # seeds 5 and 0
    found = probe(model, folder, replace(SHORT, seed=5))
    assert found.score("trained").seeds == found.score("untrained").seeds
    assert {difference.characters for difference in found.differences if difference.baseline == "untrained"} == {
        (0.0, 0.0, 0.0)
    }


@pytest.mark.parametrize("baselines", [(), ("log_mel",)])
def test_the_score_of_an_encoder_does_not_depend_on_its_baselines(
    baselines: tuple[Literal["log_mel"], ...], model: NestNetwork, folder: Path, report: CtcProbeReport
) -> None:
    found = probe(model, folder, replace(FAST, baselines=baselines))
    assert found.score("trained") == report.score("trained")
    assert [score.name for score in found.contestants] == ["trained", *baselines]
    assert [difference.baseline for difference in found.differences] == list(baselines)
    assert ("Trained minus baseline" in markdown(found)) == bool(baselines)


def test_equal_seeds_give_equal_results(model: NestNetwork, folder: Path, report: CtcProbeReport) -> None:
    one = probe(model, folder, SHORT)
    assert one == probe(model, folder, SHORT)
    other = probe(model, folder, replace(SHORT, probe_seeds=(1,)))
    assert one.score("log_mel").seeds[0].characters != other.score("log_mel").seeds[0].characters
    assert one.num_test == report.num_test


def test_the_result_is_written(folder: Path, report: CtcProbeReport, model: NestNetwork) -> None:
    output = folder / "out"
    assert sorted(path.name for path in output.iterdir()) == [
        *("hypotheses.jsonl", "probe.json", "probe.png", "rejected.jsonl", "rejected_test.jsonl", "report.md")
    ]
    found = json.loads((output / "probe.json").read_text())
    assert (found["kind"], found["task"], found["model"], found["alphabet"]) == ("probe", "ctc", "tiny.ckpt", " abcd")
    assert len(found["normalisation"]) == 4
    assert found["contestants"][2]["characters"] == report.score("log_mel").characters._asdict()
    assert found["differences"][0]["characters"] == report.differences[0].characters._asdict()
    lines = [json.loads(line) for line in (output / "hypotheses.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    assert all(line["log_mel"].keys() == {"0", "1"} for line in lines)
    text = (output / "report.md").read_text()
    assert f"| log-mel | {100 * report.score('log_mel').characters.rate:.1f} (" in text
    assert len(report.examples) == 5
    assert all(f"    text        {example.reference}" in text for example in report.examples)
    assert (output / "probe.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(OutputError, match="exists already"):
        probe(model, folder, SHORT, output=output)


def test_the_report_states_how_the_heads_were_trained(report: CtcProbeReport) -> None:
    text = markdown(report)
    assert "72 utterances for training; 8 held out, in whole recordings, which select the learning rate" in text
    assert "Adam, gradients clipped to norm 1, 16 utterances per step" in text
    assert "falls linearly to 0 over 20 epochs, and training ends early after 8 epochs without improvement." in text
    assert "Seed of the split, the untrained encoder and the bootstrap: 0." in text
    grouped = markdown(replace(report, config=replace(report.config, group_by="take", patience=20)))
    assert "8 held out, in whole groups of `take`, which" in grouped
    assert "falls linearly to 0 over 20 epochs. Labels per frame of 80 ms: 2." in grouped


@pytest.mark.parametrize(
    ("rates", "best", "named"),
    [
        ((0.005, 0.02, 0.08), {"trained": 0.02, "untrained": 0.005, "log_mel": 0.08}, "untrained, log-mel. Give"),
        ((0.02,), {"trained": 0.02, "untrained": 0.02, "log_mel": 0.02}, "trained, untrained, log-mel. Give"),
        ((0.005, 0.02, 0.08), {"trained": 0.02, "untrained": 0.02, "log_mel": 0.02}, None),
    ],
)
def test_a_learning_rate_at_the_edge_of_the_grid_is_named(
    rates: tuple[float, ...], best: dict[str, float], named: str | None, report: CtcProbeReport
) -> None:
    """A rate that is too high for one kind of features looks like content of the other."""
    contestants = [replace(score, learning_rate=best[score.name]) for score in report.contestants]
    found = markdown(replace(report, config=replace(report.config, learning_rates=rates), contestants=contestants))
    assert ("The learning rate may explain a part" in found) == (named is not None)
    assert named is None or f"was best for {named}" in found


def test_unusable_texts_are_listed_and_fast_speech_is_counted(
    model: NestNetwork, folder: Path, rows: Rows, test_rows: Rows, tmp_path: Path
) -> None:
    changed(folder, rows, {0: {"text": None}, 1: {"text": "?!"}, 2: {"text": "abcd" * 30}}, "some")
    changed(folder, test_rows, {0: {"text": "abx"}, 1: {"text": "dcba" * 30}, 2: {"text": ""}}, "some_test")
    found = probe(model, folder, SHORT, "some", "some_test", output=tmp_path / "out")
    assert found.left_out == {"training": {"no_text": 1, "empty_text": 1}, "test": {"no_text": 1}}
    assert found.num_too_fast == {"training": 1, "test": 1}
    assert (found.num_training + found.num_held_out, found.num_test) == (77, 15)
    assert found.unknown_characters == {"x": 1}
    (line,) = (tmp_path / "out" / "rejected_test.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "no_text"


def test_groups_stay_together(model: NestNetwork, folder: Path, report: CtcProbeReport) -> None:
    found = probe(model, folder, replace(SHORT, group_by="take"))
    assert found.num_held_out in (11, 12)  # one take of seven
    assert report.num_held_out == 8


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 1.0}, "held_out is 1.0: expected a share between 0 and 1"),
        ({"baselines": ("trained",)}, "baselines is .*: expected each at most once of untrained, log_mel"),
        ({"baselines": ("log_mel", "log_mel")}, "baselines is"),
        ({"labels_per_frame": 0}, "labels_per_frame is 0: expected 1 or more"),
        ({"learning_rates": ()}, r"learning_rates is \(\): expected different positive numbers"),
        ({"learning_rates": (0.1, 0.0)}, "learning_rates is"),
        ({"max_epochs": 0}, "max_epochs is 0"),
        ({"patience": 0}, "patience is 0"),
        ({"probe_seeds": (1, 1)}, r"probe_seeds is \(1, 1\): expected different seeds"),
        ({"max_batch_seconds": 0.0}, "max_batch_seconds is 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CtcProbeConfig(**settings)


def test_a_head_predicts_several_labels_from_each_frame_in_order() -> None:
    head = CtcHead(torch.zeros(2, 3), torch.ones(2, 3), num_labels=4, labels_per_frame=2, seed=0)
    with torch.no_grad():
        head.linear.weight.zero_()
        head.linear.bias.copy_(torch.tensor([0.0, 9, 0, 0, 0, 0, 9, 0]))
    assert head(torch.zeros(3, 2, 3)).argmax(dim=1).tolist() == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize(("frame_rate_hz", "labels"), [(6.25, 4), (10.0, 3), (12.5, 2), (25.0, 1), (50.0, 1)])
def test_the_default_number_of_labels_gives_at_least_25_per_second(frame_rate_hz: float, labels: int) -> None:
    assert default_labels_per_frame(frame_rate_hz) == labels


@pytest.mark.parametrize(("factor", "labels"), [(8, 2), (4, 1)])
def test_the_number_of_labels_follows_the_frame_rate(
    factor: int, labels: int, folder: Path, rows: Rows, test_rows: Rows
) -> None:
    assert (len(rows), len(test_rows)) == (80, 16)
    config = tiny_config()
    model = NestNetwork(replace(config, encoder=replace(config.encoder, subsampling_factor=factor)))
    found = probe(model, folder, replace(SHORT, max_epochs=1))
    assert (found.frame_rate_hz, found.config.labels_per_frame) == (100 / factor, labels)
    # one weight of a layer, and a linear map of stacked log-mels to the labels: a blank and 5 characters
    assert found.score("log_mel").num_parameters == 1 + (80 * factor + 1) * labels * 6


def test_repeated_characters_need_a_blank_between_them() -> None:
    assert fits("aabb", 6)
    assert not fits("aabb", 5)
    assert fits("abab", 4)
