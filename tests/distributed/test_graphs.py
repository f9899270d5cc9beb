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


def assert_same_bits(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert found[rank]["losses"] == expected[rank]["losses"]
        for name, value in found[rank]["weights"].items():
            assert torch.equal(value, expected[rank]["weights"][name]), name
            assert torch.equal(value, found[0]["weights"][name]), name


@pytest.mark.smoke
@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_ranks_replay_all_microbatches_and_sum_gradients_once_as_ddp_does(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    forms = ("replayed", "run", "summed once", "plain")
    replayed, run, summed, plain = (fit(messy_corpora, tmp_path / form, form) for form in forms)
    assert_same_bits(replayed, run)
    assert_same_bits(summed, plain)
    for rank in range(2):
        num_shapes = replayed[rank]["captures"] // 2
        assert num_shapes > 0
        # Four steps of three microbatches.
        assert replayed[rank]["replays"] == 2 * (4 * 3 - num_shapes)
        assert replayed[rank]["losses"] == pytest.approx(plain[rank]["losses"], rel=1e-5)
        for name, value in replayed[rank]["weights"].items():
            # Sums over padded rows have another order.
            torch.testing.assert_close(value, plain[rank]["weights"][name], rtol=1e-4, atol=1e-5, msg=name)
