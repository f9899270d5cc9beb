"""Which exit codes restart a job, and how often: a program in place of nestmodel ends each rank with a chosen code."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Job
from tests.slurm.runs import submit

# CODES has a word for each rank, "killed" for SIGKILL. A rank with "starts" is still starting when the others end: it
# would exit with 75 if it were asked to. In CHECKPOINTS starts, rank 0 writes a checkpoint first.
_PROGRAM = """#!/bin/bash
codes=($CODES)
code=${codes[$SLURM_PROCID]}
start=${SLURM_RESTART_COUNT:-0}
if [ "$SLURM_PROCID" = 0 ] && [ "$start" -lt "${CHECKPOINTS:-0}" ]; then
    mkdir -p run/version_0/checkpoints
    touch "run/version_0/checkpoints/step_0000000$start.ckpt"
fi
trap 'exit 75' TERM USR1
case $code in
    killed) kill -9 $$ ;;
    starts) sleep 1; exit 1 ;;
    *) exit "$code" ;;
esac
"""
MAX_STARTS = 4


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A search path on which `nestmodel` is this program."""
    path = tmp_path / "bin" / "nestmodel"
    path.parent.mkdir()
    path.write_text(_PROGRAM)
    path.chmod(0o755)
    return f"{path.parent}:/usr/local/bin:/usr/bin:/bin"


def submit_each(cluster: Cluster, folder: Path, program: str, codes: Iterable[str]) -> dict[str, Job]:
    """Starts a job in a folder of its own for each choice of codes; as many run at a time as there are processors."""
    jobs = {}
    for words in codes:
        own = folder / words.replace(" ", "-")
        own.mkdir()
        jobs[words] = submit(cluster, own, "run", PATH=program, CODES=words)
    return jobs


def test_errors_end_the_job(cluster: Cluster, tmp_path: Path, program: str) -> None:
    endings = {"1 1": "1", "2 2": "2", "1 starts": "1", "74 44": "74", "130 130": "130"}
    jobs = submit_each(cluster, tmp_path, program, endings)
    assert {codes: job.wait() for codes, job in jobs.items()} == {
        codes: f"FAILED {code}" for codes, code in endings.items()
    }
    assert {job.restarts() for job in jobs.values()} == {0}


def test_a_job_without_progress_is_restarted_three_times(cluster: Cluster, tmp_path: Path, program: str) -> None:
    endings = {"killed 44": "137", "75 75": "75", "44 1": "44", "139 44": "139"}
    jobs = submit_each(cluster, tmp_path, program, endings)
    assert {codes: job.wait() for codes, job in jobs.items()} == {
        codes: f"FAILED {code}" for codes, code in endings.items()
    }
    assert {job.restarts() for job in jobs.values()} == {MAX_STARTS - 1}
    for job in jobs.values():
        assert job.log().count("is not started again: 4 starts without a new checkpoint") == 1


def test_a_checkpoint_renews_the_right_to_restart(cluster: Cluster, tmp_path: Path, program: str) -> None:
    job = submit(cluster, tmp_path, "run", PATH=program, CODES="killed 44", CHECKPOINTS="2")
    assert job.wait() == "FAILED 137", job.explain()
    assert job.restarts() == 1 + MAX_STARTS


def test_restarts_by_slurm_itself_are_limited_as_well(cluster: Cluster, tmp_path: Path, program: str) -> None:
    (tmp_path / "run").mkdir()
    job = submit(cluster, tmp_path, "run", options=("--hold",), PATH=program, CODES="75 75")
    (tmp_path / "run" / "slurm-starts").write_text(f"{job.id} \n" * MAX_STARTS)
    cluster.run("scontrol", "release", job.id)
    assert job.wait() == "FAILED 1", job.explain()
    assert "is not started again" in job.log()
