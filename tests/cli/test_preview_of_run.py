import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nestcli import nestdata
from nestdata import AudioNoiseBatch, Corpora, batch_digest
from nestmodel import NestDataModule
from nestmodel.run_config import read_data
from tests.conftest import MessyCorpora

DATA: dict[str, Any] = {
    "plan": {"max_batch_seconds": 20, "microbatches_per_step": 4, "weights": [0.5, 0.5], "num_shapes": 3},
    "mix": {"prob": 0.9, "noise_ratio": 0.7, "noise_snr_db": [0, 10]},
    "augment": {"speech": ["PolarityInversion", {"Gain": {"p": 1.0}}], "speech_on": "both"},
    "bad_audio": {"max_share": 0.5},
    "num_workers": 0,
}


def digest(batch: AudioNoiseBatch) -> Any:
    """Returns the digest of a batch with lists in place of tuples, as JSON holds it."""
    return json.loads(json.dumps(batch_digest(batch)))


def data_module(run_yaml: Path) -> NestDataModule:
    """Returns the data module that `fit` would build of the file."""
    data, _ = read_data([run_yaml])
    return NestDataModule(data)


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the pictures, which take most of the time of a preview: the tests of this module compare digests."""
    monkeypatch.setattr("nestdata.batch.preview._draw", lambda *_: None)


@pytest.fixture
def run_yaml(messy_corpora: MessyCorpora, tmp_path: Path) -> Path:
    data = {
        **DATA,
        "corpus": [str(messy_corpora.speech), str(messy_corpora.windows)],
        "noise": str(messy_corpora.noise),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"seed": 7, "data": data}))
    return path


def preview(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    command = ["sample-batch", "preview", *map(str, arguments), "-o", str(tmp_path / "preview"), "--json"]
    assert nestdata.main(command) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("step", "rank", "world_size"), [(0, 0, 1), (3, 1, 2)])
def test_preview_shows_the_batch_of_the_data_module_of_the_same_file(
    step: int, rank: int, world_size: int, run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--config", run_yaml, "--step", step, "--rank", rank, "--world-size", world_size)
    shown = preview(tmp_path, capsys, *flags)
    dataset = data_module(run_yaml).train_dataset
    assert shown == digest(dataset[step, rank * 4 // world_size])
    assert {mix["mode"] for mix in shown["mixes"]} > {"noise"}


def test_flags_override_the_file(
    run_yaml: Path, messy_corpora: MessyCorpora, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load(run_yaml.read_text())
    del content["data"]["plan"]["weights"]
    run_yaml.write_text(yaml.safe_dump(content))
    by_flags = preview(
        *(tmp_path, capsys, messy_corpora.speech, "--config", run_yaml, "--seed", 3, "--mix-prob", 0.25),
        *("--max-batch-seconds", 30, "--microbatches-per-step", 2, "--noise", messy_corpora.speech),
    )
    content["seed"] = 3
    content["data"]["corpus"] = content["data"]["noise"] = str(messy_corpora.speech)
    content["data"]["mix"]["prob"] = 0.25
    content["data"]["plan"].update(max_batch_seconds=30, microbatches_per_step=2)
    run_yaml.write_text(yaml.safe_dump(content))
    assert preview(tmp_path, capsys, "--config", run_yaml) == by_flags


def test_plan_reads_the_same_file(
    run_yaml: Path, messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nestdata.main(["plan", "--config", str(run_yaml), "--world-size", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    plan = data_module(run_yaml).train_dataset.plan
    assert shown["fingerprint"] == plan.fingerprint
    assert len(shown["corpora"]) == len(Corpora.open([messy_corpora.speech, messy_corpora.windows]).corpora)
