"""A rank that is slower than the other is named with the phase in which it loses its time."""

import re
from pathlib import Path

import pytest

from tests.conftest import MessyCorpora
from tests.distributed.runs import Run

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]
BASE_MS, EXTRA_MS = 300, 90
"""Times of a microbatch. The work of the tiny model adds some, so that the slow rank takes about a fifth longer."""


def logged(run: Run) -> list[dict[str, float]]:
    return [line["logged"] for line in run._lines() if "logged" in line]


@pytest.mark.parametrize("phase", ["loading", "forward", "backward"])
def test_a_slow_rank_is_named_once_with_its_phase(messy_corpora: MessyCorpora, tmp_path: Path, phase: str) -> None:
    run = Run(corpora=messy_corpora, directory=tmp_path / "run", world_size=2, max_steps=31)
    faults = {0: ("slow in nothing", BASE_MS, 0), 1: (f"slow in {phase}", BASE_MS, EXTRA_MS)}
    assert run.start(faults=faults) == [0, 0], run.log(0)
    assert re.findall(r"Rank (\d+) \(node 0\) .* mostly in (\w+)", run.log(0)) == [("1", phase)]
    last = logged(run)[-1]
    assert last["slowest_rank"] == 1
    assert 1.1 < last["slowest_rank_factor"] < 1.4
