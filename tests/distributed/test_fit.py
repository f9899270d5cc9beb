import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import MessyCorpora
from tests.distributed import fit

REPOSITORY = Path(__file__).parents[2]


def fit_with(corpora: MessyCorpora, directory: Path, world_size: int) -> dict[str, Any]:
    """Returns the batches and losses of every rank, and the gradients.

    Several ranks are real processes, which communicate by gloo. One rank trains in this process, without DDP.
    """
    directory.mkdir()
    arguments = [str(word) for word in (corpora.speech, corpora.noise, world_size, directory)]
    if world_size == 1:
        fit.main(arguments)
    else:
        command = [sys.executable, "-m", "tests.distributed.fit", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=400, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    ranks = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(world_size)]
    return {"ranks": ranks, "grads": torch.load(directory / "grads.pt", weights_only=True)}


@pytest.mark.smoke
@pytest.mark.multiprocess
@pytest.mark.slow
def test_one_rank_and_two_ranks_make_equal_optimizer_steps(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    one, two = (fit_with(messy_corpora, tmp_path / str(size), size) for size in (1, 2))
    keys = [sorted(tuple(key) for rank in run["ranks"] for key in rank["keys"]) for run in (one, two)]
    assert keys[0] == keys[1]
    assert len(two["ranks"][0]["keys"]) == len(two["ranks"][1]["keys"])
    assert two["ranks"][0]["losses"] == two["ranks"][1]["losses"]
    # Two ranks sum in a different order: in float32, rounding differs by about 1e-7 of the largest term.
    assert one["ranks"][0]["losses"] == pytest.approx(two["ranks"][0]["losses"], rel=1e-5)
    for name, grad in one["grads"].items():
        difference = (two["grads"][name] - grad).norm()
        assert difference < 1e-4 * grad.norm() + 1e-6, name
