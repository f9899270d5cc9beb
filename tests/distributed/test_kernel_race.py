import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nestmodel.training.starting.origin import STARTER
from tests.conftest import MessyCorpora

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_all_ranks_take_the_choice_of_the_first(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != STARTER}
    environment |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "tests.distributed.raced_run"]
    arguments = [messy_corpora.speech, messy_corpora.noise, tmp_path]
    outcome = subprocess.run(
        [*command, *map(str, arguments)], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300
    )
    assert outcome.returncode == 0, outcome.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert (first["races"], second["races"]) == (1, 0)
    assert first["kernels"] == second["kernels"]
    assert first["kernels"]["subsampling"] == "triton"
    assert first["uses"] is second["uses"] is True
