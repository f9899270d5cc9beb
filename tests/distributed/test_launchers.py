"""Real processes of torchrun, and of SLURM by its environment variables: right, wrong and left-out numbers of ranks."""

from pathlib import Path

import pytest
import torch

from tests.conftest import MessyCorpora
from tests.distributed.test_outcomes import EXIT_USAGE, SCRIPTS, error_lines, fit_command, start
from tests.distributed.test_startup import MARKER, kill_all, wait_until_gone
from tests.ports import free_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(600)]

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "nest", "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost"}
JOB |= {"SLURM_NODEID": "0", "SLURM_STEP_ID": "0"}


def without_devices(command: list[str]) -> list[str]:
    at = command.index("--devices")
    return [*command[:at], *command[at + 2 :]]


def torchrun(num_ranks: int, command: list[str]) -> list[str]:
    own = ["--nproc-per-node", str(num_ranks), "--master-port", str(free_port()), "--no-python"]
    return [str(SCRIPTS / "torchrun"), *own, *command]


def finish(command: list[str], directory: Path, **variables: str) -> int:
    """Runs a command until no process is left that it has started, and returns its exit code."""
    run = start(command, directory, **{MARKER: str(directory)}, **variables)
    try:
        run.wait(timeout=300)
        return wait_until_gone(run, str(directory), directory / "log")
    finally:
        kill_all(run, str(directory))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    (path,) = directory.glob("run/version_*/checkpoints/step_00000004.ckpt")
    found: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    return found


@pytest.mark.smoke
def test_torchrun_and_srun_without_devices_train_one_model_as_lightning_does(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    own, by_torchrun, by_srun = (tmp_path / name for name in ("own", "torchrun", "srun"))
    assert finish(fit_command(messy_corpora, own, 2), own) == 0, (own / "log").read_text()
    command = without_devices(fit_command(messy_corpora, by_torchrun, 2))
    assert finish(torchrun(2, command), by_torchrun) == 0, (by_torchrun / "log").read_text()
    command = without_devices(fit_command(messy_corpora, by_srun, 2))
    # As `srun -n 2`, which sets no SLURM_NTASKS_PER_NODE.
    step = {**JOB, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "MASTER_PORT": str(free_port())}
    tasks = [start(command, by_srun, **step, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in ("0", "1")]
    assert [task.wait(timeout=300) for task in tasks] == [0, 0], (by_srun / "log").read_text()
    expected = weights(own)
    for directory in (by_torchrun, by_srun):
        assert [path.name for path in (directory / "run").iterdir()] == ["version_0"]
        assert "ranks       2, cpu" in (directory / "log").read_text()
        found = weights(directory)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_tasks_of_a_wrong_step_end_with_2_and_the_first_one_alone_prints_why(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    command = fit_command(messy_corpora, tmp_path, 1)
    tasks = [start(command, tmp_path, **JOB, SLURM_NTASKS="2", SLURM_PROCID=r, SLURM_LOCALID=r) for r in ("0", "1")]
    assert [task.wait(timeout=120) for task in tasks] == [EXIT_USAGE] * 2, (tmp_path / "log").read_text()
    assert len(error_lines(tmp_path)) == 1
    assert "another rank" not in (tmp_path / "log").read_text()
    assert not (tmp_path / "run").exists()
