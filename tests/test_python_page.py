"""Runs the code of docs/python.md, in a folder with its two corpora."""

import re
from pathlib import Path
from typing import Any

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
