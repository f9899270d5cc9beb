"""What happens to a job, what it does, and how it ends: the rows of the table in docs/long-runs.md."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.conftest import MessyCorpora
from tests.slurm.cluster import Cluster
from tests.slurm.runs import NUM_STEPS, TinyRun


@pytest.fixture
def run(cluster: Cluster, messy_corpora: MessyCorpora, tmp_path: Path) -> TinyRun:
    return TinyRun(cluster, messy_corpora, tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(
    cluster: Cluster, messy_corpora: MessyCorpora, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """The weights after a run on two nodes that nothing disturbed."""
    run = TinyRun(cluster, messy_corpora, tmp_path_factory.mktemp("uninterrupted"))
    job = run.submit()
    assert job.wait() == "COMPLETED 0", job.explain()
    assert job.restarts() == 0
    assert run.leftovers(job) == []
    return run.weights()


def assert_same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_killed_rank_restarts_the_job_which_resumes_exactly(
    run: TinyRun, uninterrupted: dict[str, torch.Tensor]
) -> None:
    job = run.submit(pauses=True)
    run.wait_for_pause(job)
    os.kill(job.ranks()[1], signal.SIGKILL)
    run.go()
    assert job.wait() == "COMPLETED 0", job.explain()
    assert job.restarts() == 1
    assert_same(run.weights(), uninterrupted)
    assert run.leftovers(job) == []
