import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from nestcli.nestmodel import main
from tests.conftest import MessyCorpora
from tests.terminal import Terminal
from tests.training import TINY


def fit_arguments(corpora: MessyCorpora, directory: Path) -> list[str]:
    (directory / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    data = [str(corpora.windows), "--noise", str(corpora.noise), "--data.bad-audio.max-share", "0.5"]
    return ["fit", *data, "--config", "tiny.yaml", "--output", "run", "--accelerator", "cpu"]


@pytest.mark.slow
def test_a_run_on_a_terminal_shows_a_summary_and_a_panel(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    terminal = Terminal(80, 30)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "TTY_COMPATIBLE"):
        environment.pop(name, None)
    arguments = [*fit_arguments(messy_corpora, tmp_path), "--val-corpus", str(messy_corpora.speech)]
    code = terminal.run([Path(sys.executable).parent / "nestmodel", *arguments], tmp_path, environment)
    lines = terminal.lines()
    terminal.close()
    assert code == 0, "\n".join(lines)
    names = "corpus noise validation model steps batches padding ranks numbers start saved log output".split()
    assert [line.split()[0] for line in lines if re.match(r"\w+ {2,}\S", line)][: len(names)] == names
    # One panel, although it was drawn many times and warnings were printed in the meantime.
    (first,) = [index for index, line in enumerate(lines) if line.startswith("step ")]
    assert lines[first].startswith("step 4 of 4 ━")
    assert lines[first + 1].startswith("finished   loss ")
    assert any(line.startswith("validation at 4   loss ") for line in lines[first:])
    assert "speech replaced" in " ".join(lines[:first])  # one of the windows is damaged
    assert any(line.startswith("finished: step 4 after ") for line in lines[first:])
    assert lines[-1].startswith("metrics:") or any("run/version_0/metrics.csv" in line for line in lines[first:])
    assert not re.search("FLOPs|TPU|Tip|Seed set|`Trainer", "\n".join(lines))


def test_a_quiet_run_shows_nothing(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quiet.yaml").write_text("quiet: true\nlog: [csv]\n")
    arguments = [*fit_arguments(messy_corpora, tmp_path), "--config", "streaming", "--config", "quiet.yaml"]
    arguments += ["--max-steps", "2"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert not re.search(r"^(step|corpus)\b", shown.err, re.MULTILINE)
    assert main([*arguments, "--no-quiet"]) == 0
    shown = capsys.readouterr()
    assert re.match(r"finished: step 2 after 0:\d\d:\d\d, loss \d\.\d{3} \(token entropy \d\.\d{3}\)\n", shown.out)
    assert "export run/version_1/checkpoints/last.ckpt --to onnx-streaming\n" in shown.out  # which can hold its encoder
    assert not (tmp_path / "run" / "version_0" / "tensorboard").exists()


def test_a_run_without_a_terminal_shows_lines(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*fit_arguments(messy_corpora, tmp_path), "--checkpoints.every-n-steps", "1", "--max-steps", "2"]
    assert main([*arguments, "--log", "csv"]) == 0
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert lines[0].startswith("corpus      ")
    assert any(re.match(r"step 1 of 2, .*loss \d\.\d{3}", text) for text in lines), lines
    assert any(text.startswith("step 2 of 2") for text in lines)
    assert "next: nestmodel features run/version_0/checkpoints/last.ckpt" in shown.out
    assert "  or: nestmodel export run/version_0/checkpoints/last.ckpt --to huggingface\n" in shown.out
    assert "reason:" not in shown.out
    assert main([*arguments, "--log", "csv", "--resume"]) == 0
    assert "nothing to train: " in capsys.readouterr().out
