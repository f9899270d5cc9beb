"""Checks the page for users of NeMo: every key and option that it names exists."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from nestcli.nestdata import main
from nestmodel import RunConfig

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "from-nemo.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*?) \| (.*?) \|", PAGE, re.MULTILINE)


def test_keys_of_the_configuration_exist() -> None:
    named = {key for _, ours in ROWS for key in re.findall(r"`((?:data|model|trainer|checkpoints)\.[\w.]+)`", ours)}
    assert len(named) >= 20
    for key in sorted(named):
        part: Any = RunConfig
        for name in key.split("."):
            hints = get_type_hints(part)
            assert name in hints, key
            part = next(iter(get_args(hints[name])), hints[name])  # of the forms of an encoder, FastConformer


def test_the_options_of_prepare_exist(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["prepare", "--help"]) == 0
    known = re.findall(r"--[\w-]+", capsys.readouterr().out)
    options = re.findall(r"`nestdata prepare (--[\w-]+)", PAGE)
    assert len(options) >= 4
    assert set(options) <= set(known)
