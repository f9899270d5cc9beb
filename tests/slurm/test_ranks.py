"""Numbers of tasks that a run can and cannot compute with, by a real srun and sbatch."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.features_runs import DYING, NESTMODEL, contents, features, with_features_of_one_rank
from tests.conftest import MessyCorpora
from tests.distributed.commands import fit_command
from tests.slurm.cluster import Cluster
from tests.slurm.runs import ENVIRONMENT

pytestmark = pytest.mark.timeout(600)


def launch(cluster: Cluster, folder: Path, *command: str) -> tuple[int, str]:
    """Runs a command of SLURM in a folder; returns its exit code and output."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=cluster.environment | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_srun_with_another_number_of_tasks_is_one_line_and_without_devices_its_tasks_train(
    cluster: Cluster, messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    command = fit_command(messy_corpora, tmp_path, 2)
    code, output = launch(cluster, tmp_path, "srun", "--ntasks", "1", *command)
    (line,) = re.findall("^error: .*", output, re.MULTILINE)
    assert (code, "SLURM_NTASKS is 1 on 1 node, but --devices 2 x --num-nodes 1 is 2 ranks" in line) == (2, True)
    assert not (tmp_path / "run").exists()
    at = command.index("--devices")
    code, output = launch(cluster, tmp_path, "srun", "--nodes", "1", "--ntasks", "2", *command[:at], *command[at + 2 :])
    assert code == 0, output
    assert re.findall("^ranks +(.), cpu", output, re.MULTILINE) == ["2"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]


def test_a_job_that_forgets_srun_is_one_line(cluster: Cluster, messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    command = fit_command(messy_corpora, tmp_path, 2)
    script = tmp_path / "job"
    script.write_text(f"#!/bin/sh\n{' '.join(command)}\n")
    options = ["--wait", "--ntasks", "2", "--output", str(tmp_path / "log")]
    code, _ = launch(cluster, tmp_path, "sbatch", *options, str(script))
    (line,) = re.findall("^error: .*", (tmp_path / "log").read_text(), re.MULTILINE)
    assert (code, "srun has not started this process (SLURM_STEP_ID is not set)" in line) == (2, True)
    assert not (tmp_path / "run").exists()


def test_features_of_two_nodes_equal_those_of_one_process_and_a_killed_task_is_named(
    cluster: Cluster, tmp_path: Path
) -> None:
    directory = with_features_of_one_rank(tmp_path)
    srun = ("srun", "--nodes", "2", "--ntasks-per-node", "1", "--kill-on-bad-exit")
    code, output = launch(cluster, directory, *srun, *DYING, *features("two"))
    assert code != 0
    assert re.search("task 1: Killed", output), output
    assert not (directory / "two").exists()
    code, output = launch(cluster, directory, *srun, *NESTMODEL, *features("two"))
    assert code == 0, output
    assert contents(directory / "two") == contents(directory / "one")
