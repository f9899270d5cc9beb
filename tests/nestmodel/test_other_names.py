import re

import pytest

from nestdata import PrepareConfig, SegmentConfig
from nestmodel import ConfigError, RunConfig
from nestmodel.plain_values import build, name_here, names_elsewhere, places
from tests.scripts import REPOSITORY

PLACES = list(places(RunConfig))
OF_COMMANDS = {"device", "input", "jobs", "layers", "max_segment_seconds", "model", "overwrite", "to", "world_size"}


def test_every_name_of_nemo_in_the_documentation_leads_to_its_name_here() -> None:
    table = (REPOSITORY / "docs" / "from-nemo.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)`(?:, `(\w+)`)? \| `([\w.]+)` \|", table, re.MULTILINE)
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
