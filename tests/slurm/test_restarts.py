"""Which exit codes restart a job, and how often: a program in place of nestmodel ends each rank with a chosen code."""

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
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


@pytest.mark.parametrize(
    ("codes", "ending"),
    [
        ("0 0", "COMPLETED 0"),
        ("1 1", "FAILED 1"),
        ("2 2", "FAILED 2"),
        ("1 starts", "FAILED 1"),
        ("74 44", "FAILED 74"),
        ("130 130", "FAILED 130"),
    ],
)
def test_errors_end_the_job(cluster: Cluster, tmp_path: Path, program: str, codes: str, ending: str) -> None:
    job = submit(cluster, tmp_path, "run", PATH=program, CODES=codes)
    assert job.wait() == ending, job.explain()
    assert job.restarts() == 0


@pytest.mark.parametrize(
    ("codes", "ending"), [("killed 44", "FAILED 137"), ("75 75", "FAILED 75"), ("44 1", "FAILED 44")]
)
def test_a_job_without_progress_is_restarted_three_times(
    cluster: Cluster, tmp_path: Path, program: str, codes: str, ending: str
) -> None:
    job = submit(cluster, tmp_path, "run", PATH=program, CODES=codes)
    assert job.wait() == ending, job.explain()
    assert job.restarts() == MAX_STARTS - 1
    assert job.log().count("is not started again, after 4 starts without a new checkpoint") == 1


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
