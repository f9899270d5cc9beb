import re
from typing import Any, get_args, get_type_hints

import pytest

from nestcli.nestdata import main
from nestdata import PrepareConfig, SegmentConfig
from nestmodel import ConfigError, RunConfig
from nestmodel.config_files import build, name_here, names_elsewhere, places
from tests.scripts import REPOSITORY

PAGE = (REPOSITORY / "docs" / "from-nemo.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*?) \| (.*?) \|", PAGE, re.MULTILINE)
PLACES = list(places(RunConfig))
OF_COMMANDS = {"device", "input", "jobs", "layers", "max_segment_seconds", "model", "overwrite", "to", "world_size"}


def test_every_name_of_nemo_in_the_documentation_leads_to_its_name_here() -> None:
    rows = re.findall(r"^\| `([\w.]+)`(?:, `(\w+)`)? \| `([\w.]+)` \|", PAGE, re.MULTILINE)
    assert len(rows) > 60
    for first, second, ours in rows:
        for theirs in filter(None, (first, second)):
            assert ours in name_here(theirs, PLACES), theirs


def test_every_name_here_exists() -> None:
    known = [*PLACES, *places(PrepareConfig), *places(SegmentConfig), *OF_COMMANDS]
    assert [own for own, _ in names_elsewhere() if not any(f".{place}".endswith(f".{own}") for place in known)] == []


@pytest.mark.parametrize("section", ["", "model", "model.config.encoder", "data.plan", "trainer", "checkpoints"])
@pytest.mark.parametrize(("theirs", "ours"), [("gpus", "trainer.devices"), ("learning_rate", "config.optimizer.lr")])
def test_a_name_of_another_framework_gets_the_name_here_at_every_depth(section: str, theirs: str, ours: str) -> None:
    content: dict[str, object] = {theirs: 1}
    for part in reversed(section.split(".") if section else []):
        content = {part: content}
    with pytest.raises(ConfigError, match=re.escape(f"{theirs} is unknown; here it is ") + f"[a-z.]*{ours}"):
        build(RunConfig, content, "")


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
