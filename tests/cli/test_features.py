import json
from pathlib import Path

import numpy as np
import pytest

from nestcli.nestmodel import main
from nestmodel import NestNetwork, save_network
from tests.addressed import WebServer
from tests.cli.commands import run
from tests.extras import needs
from tests.nestmodel.evaluate.spoken_tones import write_manifest
from tests.synthesis import hiss, tone, write_audio, write_jsonl
from tests.training import tiny_config

needs_probe = needs("probe", "jiwer", "sklearn")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `model.ckpt`, and `speech.json` with 24 files of two pitches, a broken file and a missing one."""
    directory = tmp_path_factory.mktemp("features")
    save_network(NestNetwork(tiny_config()), directory / "model.ckpt")
    rows = []
    for i in range(24):
        audio = np.concatenate([hiss(3200, i, level=0.01), tone((300, 3000)[i % 2], 0.1 + i / 100)])
        write_audio(directory / "speech" / f"{i}.wav", audio)
        rows.append({"audio_filepath": f"speech/{i}.wav", "pitch": "lh"[i % 2], "lang": "en"})
    (directory / "speech" / "broken.wav").write_bytes(b"no audio at all")
    rows += [{"audio_filepath": f"speech/{name}.wav", "pitch": "l"} for name in ("broken", "gone")]
    write_jsonl(directory / "speech.json", rows)
    return directory


@pytest.fixture(autouse=True)
def _in_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)


@pytest.mark.slow
def test_features_reports_its_output_and_the_rejected_inputs(directory: Path, tmp_path: Path) -> None:
    outcome = run(
        *("nestmodel", "features", "model.ckpt", "speech.json", "-o", tmp_path / "f", "--layers", "0", "2"),
        *("--device", "cpu", "--dtype", "float16", "--max-batch-seconds", "2"),
        cwd=directory,
    )
    assert outcome.code == 0, outcome.err
    assert all(line.startswith("utterances: ") for line in outcome.err.splitlines())  # progress of a slow run
    summary, rejected, index = outcome.out.splitlines()
    assert summary.startswith(f"{tmp_path / 'f'}: 24 utterances, 0.00 h, ")
    assert summary.endswith("frames at 12.5 Hz, layers 0,2 of dim 16")
    assert rejected == f"  rejected: 1 unreadable, 1 missing; see {tmp_path / 'f' / 'rejected.jsonl'}"
    assert index == f"  index: {tmp_path / 'f' / 'index.jsonl'}"
    rows = [json.loads(line) for line in (tmp_path / "f" / "index.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    assert rows[0]["labels"] == {"language": "en", "pitch": "h"}
    values = np.load(tmp_path / "f" / rows[0]["file"])
    assert values.dtype == np.float16
    assert values.shape == (2, rows[0]["num_frames"], 16)
    assert json.loads((tmp_path / "f" / "meta.json").read_text())["model"] == "model.ckpt"


def test_features_prints_its_summary_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["features", "model.ckpt", "speech", "-o", str(tmp_path / "f"), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_utterances"], found["layers"], found["left_out"]) == (24, [2], {"unreadable": 1})
    assert found["path"] == str(tmp_path / "f")


@needs("remote", "obstore")
def test_features_of_a_url_equal_those_of_the_file(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with WebServer(directory).running() as server:
        values = []
        for number, given in enumerate(("speech/3.wav", f"{server.url}/speech/3.wav")):
            output = tmp_path / str(number)
            assert main(["features", "model.ckpt", given, "-o", str(output), "--device", "cpu"]) == 0
            row = json.loads((output / "index.jsonl").read_text())
            values.append(np.load(output / row["file"]))
        np.testing.assert_array_equal(*values)
        assert main(["features", "model.ckpt", f"{server.url}/gone.wav", "-o", str(tmp_path / "gone")]) != 0
        assert f"{server.url}/gone.wav" in capsys.readouterr().err


@needs_probe
def test_probe_prints_a_table_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "p"
    arguments = "probe label model.ckpt speech.json --label pitch --device cpu -o".split()
    assert main([*arguments, str(output)]) == 0
    out = capsys.readouterr().out
    for text in (
        *("features", "accuracy, %", "untrained", "100.0 (61.0 to 100.0)", "50.0 (18.8 to 81.2)"),
        *("pitch: 2 classes, 18 training utterances, 6 held out", "rejected: 1 unreadable, 1 missing; see"),
    ):
        assert text in out
    assert sorted(path.name for path in output.iterdir()) == ["probe.json", "rejected.jsonl"]


@needs_probe
def test_probe_of_content_prints_error_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seeds in (("train", range(24)), ("test", range(50, 60))):
        write_manifest(tmp_path, name, seeds)
    inputs = ["model.ckpt", str(tmp_path / "train.json"), "--test", str(tmp_path / "test.json"), "--device", "cpu"]
    options = ["--learning-rates", "0.1", "--max-epochs", "2", "--probe-seeds", "3"]
    assert main(["probe", "characters", *inputs, *options, "-o", str(tmp_path / "ctc")]) == 0
    out = capsys.readouterr().out
    for text in ("CER, %", "log-mel", "CER, trained minus untrained: ", "22 training utterances, 2 held out, 10 test"):
        assert text in out
    assert out.splitlines()[-1] == f"report: {tmp_path / 'ctc' / 'probe.json'}"
