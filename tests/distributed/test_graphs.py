import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import MessyCorpora

REPOSITORY = Path(__file__).parents[2]


def fit(corpora: MessyCorpora, directory: Path, form: str) -> list[dict[str, Any]]:
    """Returns the losses and the weights of both ranks, which are real processes and communicate by gloo."""
    directory.mkdir()
    arguments = [str(corpora.speech), str(corpora.noise), str(directory), form]
    command = [sys.executable, "-m", "tests.distributed.fit_graphs", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return [
        {**seen, "weights": torch.load(directory / f"weights-{rank}.pt", weights_only=True)}
        for rank, seen in enumerate(ranks)
    ]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_ranks_replay_all_microbatches_of_a_step_but_the_last(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    replayed, run, plain = (fit(messy_corpora, tmp_path / form, form) for form in ("replayed", "run", "plain"))
    for rank in range(2):
        num_shapes = replayed[rank]["captures"] // 2
        assert num_shapes > 0
        # Four steps of three microbatches, of which the last one sums gradients over ranks.
        assert replayed[rank]["replays"] <= 2 * (4 * 2 - num_shapes)
        assert replayed[rank]["losses"] == run[rank]["losses"]
        assert replayed[rank]["losses"] == pytest.approx(plain[rank]["losses"], rel=1e-5)
        for name, value in replayed[rank]["weights"].items():
            assert torch.equal(value, run[rank]["weights"][name]), name
            assert torch.equal(value, replayed[0]["weights"][name]), name
            torch.testing.assert_close(value, plain[rank]["weights"][name], rtol=1e-4, atol=1e-5, msg=name)
