"""What happens to a job, what it does, and how it ends: the rows of the table in docs/many-gpus.md."""

import os
import signal
from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import MessyCorpora
from tests.slurm.cluster import Cluster, Job, wait_until
from tests.slurm.runs import NUM_STEPS, PAUSE_AT, TinyRun


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


def assert_restarted_once(run: TinyRun, job: Job, uninterrupted: dict[str, torch.Tensor]) -> None:
    """Asserts that a job was restarted and ended with the weights of an uninterrupted run, without leftovers."""
    assert job.wait() == "COMPLETED 0", job.explain()
    assert job.restarts() == 1
    assert_same(run.weights(), uninterrupted)
    assert run.leftovers(job) == []


@pytest.mark.smoke
def test_a_killed_rank_restarts_the_job_which_resumes_exactly(
    run: TinyRun, uninterrupted: dict[str, torch.Tensor]
) -> None:
    job = run.submit(pauses=True)
    run.wait_for_pause(job)
    os.kill(job.ranks()[1], signal.SIGKILL)
    run.go()
    assert_restarted_once(run, job, uninterrupted)


def test_a_warning_before_the_time_limit_in_a_validation_lets_it_finish_and_restarts_the_job(
    run: TinyRun, uninterrupted: dict[str, torch.Tensor]
) -> None:
    job = run.submit("--time=60", "--signal=USR1@120", pauses=True, in_validation=True)
    run.wait_for_pause(job)
    run.cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=3")  # so that the warning comes now
    job.wait_for_log("preempted after step")
    run.go()
    run.cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    assert_restarted_once(run, job, uninterrupted)


def test_a_requeue_by_hand_writes_a_checkpoint_first(run: TinyRun, uninterrupted: dict[str, torch.Tensor]) -> None:
    job = run.submit(pauses=True)
    run.wait_for_pause(job)
    run.cluster.run("scontrol", "requeue", job.id)
    job.wait_for_log(f"preempted after step {PAUSE_AT + 1}")
    run.go()
    assert_restarted_once(run, job, uninterrupted)


def test_a_cancelled_job_writes_a_checkpoint_and_stays_cancelled(
    run: TinyRun, uninterrupted: dict[str, torch.Tensor]
) -> None:
    job = run.submit(pauses=True)
    run.wait_for_pause(job)
    run.cluster.run("scancel", job.id)
    assert job.wait().startswith("CANCELLED"), job.explain()
    assert run.newest_step() == PAUSE_AT + 1
    assert job.restarts() == 0
    assert run.leftovers(job) == []
    assert run.submit().wait() == "COMPLETED 0"
    assert_same(run.weights(), uninterrupted)


def test_a_node_whose_slurmd_dies_restarts_the_job(run: TinyRun, uninterrupted: dict[str, torch.Tensor]) -> None:
    job = run.submit(pauses=True)
    run.wait_for_pause(job)
    run.cluster.kill_node("n2")
    try:
        wait_until("SLURM requeues the job", lambda: job.restarts() == 1, job.explain)
        run.go()
        wait_until("the ranks of both nodes have ended", lambda: not job.processes(), job.explain)
    finally:
        run.cluster.start_node("n2")
    assert_restarted_once(run, job, uninterrupted)


def test_a_job_on_another_number_of_nodes_continues_the_run(run: TinyRun) -> None:
    first = run.submit(pauses=True)
    run.wait_for_pause(first)
    run.cluster.run("scancel", first.id)
    first.wait()
    alone = run.submit("--nodes=1")
    assert alone.wait() == "COMPLETED 0", alone.explain()
    assert run.newest_step() == NUM_STEPS
    assert f"step_{PAUSE_AT + 1:08d}" in (run.folder / "run" / "slurm-starts").read_text()
    assert run.leftovers(alone) == []


def test_an_array_trains_each_seed_in_its_own_directory_at_the_same_time(run: TinyRun) -> None:
    tasks = run.submit_array(num_seeds=2)
    for task in tasks:
        task.wait_for_log("step 0")
    run.go()
    for seed, task in enumerate(tasks):
        assert task.wait() == "COMPLETED 0", task.explain()
        directory = run.folder / "run" / str(seed) / "version_0"
        assert yaml.safe_load((directory / "config.yaml").read_text())["seed"] == seed
        assert (directory / "checkpoints" / f"step_{NUM_STEPS:08d}.ckpt").exists()
        assert run.leftovers(task) == []
