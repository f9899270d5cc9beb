"""Runs the code of docs/python.md and the programs of docs/own-model.md, in a folder with the two corpora of each."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestdata import prepare_corpus

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_code_of_the_page_runs_from_corpora_to_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("speech", "noise"):
        prepare_corpus([REPOSITORY / "manifests" / "demo" / f"{name}.json"], tmp_path / f"{name}.corpus")
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert names["trainer"].global_step == 20
    assert Path("runs/demo/version_0/checkpoints/last.ckpt").exists()
    assert (names["batch"].key.step, names["batch"].key.microbatch) == (1_000_000, 3)
    assert len(names["loader"]) == 100 * 2
    assert names["loss"].isfinite()


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = (REPOSITORY / "docs" / "own-model.md").read_text(encoding="utf-8")
    for program, name in re.findall(r'^```python\n("""(\w+\.py): .*?)^```$', page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(program)
    for name in ("speech", "noise"):
        prepare_corpus([REPOSITORY / "manifests" / "demo" / f"{name}.json"], tmp_path / f"{name}.corpus")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*multi-threaded.*fork")
@pytest.mark.parametrize("name", ["ctc", "denoise"])
def test_the_loss_of_a_program_of_the_page_falls(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
    found = losses(capsys.readouterr().out)
    assert len(found) == 20
    assert np.mean(found[-4:]) < 0.8 * np.mean(found[:4])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_that_go_on_where_others_have_ended_train_as_one_that_did_not_end(folder: Path) -> None:
    program = folder / "languages.py"
    text = program.read_text()

    def trained(num_ranks: int, num_steps: int) -> list[float]:
        program.write_text(text.replace('Path("languages.pt"), 12', f'Path("languages.pt"), {num_steps}'))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        run = subprocess.run([*launch, str(program)], capture_output=True, text=True, timeout=200, check=False)
        assert run.returncode == 0, run.stderr
        return losses(run.stdout)

    in_parts = trained(2, 5) + trained(4, 12)
    (folder / "languages.pt").unlink()
    whole = trained(1, 12)
    assert len(whole) == 12
    assert whole[-1] < 0.8 * whole[0]
    np.testing.assert_allclose(in_parts, whole, rtol=1e-3)
