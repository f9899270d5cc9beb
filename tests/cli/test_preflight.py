import json
from pathlib import Path

import pytest
import yaml

from nestcli.nestmodel import main
from nestdata import Corpus
from tests.conftest import MessyCorpora
from tests.synthesis import folder_corpus, hiss
from tests.training import TINY


def arguments(directory: Path, corpus: Path) -> list[str]:
    (directory / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return ["preflight", str(corpus), "--config", str(directory / "tiny.yaml"), "--output", str(directory / "run")]


def corpus_without_audio(directory: Path) -> Corpus:
    corpus = folder_corpus(directory, {f"{i}.wav": hiss(16000, i) for i in range(4)})
    for path in directory.glob("*.wav"):
        path.unlink()
    return corpus


def test_preflight_prints_a_table_and_leaves_no_files(
    messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments(tmp_path, messy_corpora.speech)) == 0
    out = capsys.readouterr().out
    for name in ("step", "shards", "audio", "disk", "ranks"):
        assert name in out
    assert "failed" not in out
    assert "audio: the loader gives " in out
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_preflight_names_a_corpus_of_less_than_two_steps(
    messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*arguments(tmp_path, messy_corpora.speech), "--max-batch-seconds", "200"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("few steps: ")]
    assert "steps of the 400 s that were asked for. For about 8 steps an epoch: --max-batch-seconds" in line


def test_a_failed_check_sets_the_exit_code_and_is_named_in_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    corpus = corpus_without_audio(tmp_path / "speech")
    assert main([*arguments(tmp_path, corpus.path), "--json", "--num-batches", "1"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    status = {check["name"]: check["ranks"][0]["status"] for check in report["checks"]}
    assert status["audio"] == "failed"
    assert status["step"] == "ok"


@pytest.mark.slow
def test_the_budget_is_printed_as_yaml_that_a_run_accepts(
    messy_corpora: MessyCorpora, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = [*arguments(tmp_path, messy_corpora.speech), "--accelerator", "cpu", "--data.plan.max-cuts", "1"]
    flags += ["--find-budget", "--memory-limit", "6GB", "--memory-margin", "0.2"]
    assert main(flags) == 0
    shown = capfd.readouterr()
    assert "trying 5 s: " in shown.err
    assert "batch budgets on cpu, 4.80 GB a rank" in shown.out
    assert "A larger budget would not change the batches of this corpus." in shown.out
    text = shown.out[shown.out.index("data:\n") :]
    (tmp_path / "budget.yaml").write_text(text)
    seconds = yaml.safe_load(text)["data"]["plan"]["max_batch_seconds"]
    assert main(["fit", *flags[1:4], "--config", str(tmp_path / "budget.yaml"), "--print-config"]) == 0
    printed = yaml.safe_load(capfd.readouterr().out)
    assert printed["data"]["plan"]["max_batch_seconds"] == seconds
