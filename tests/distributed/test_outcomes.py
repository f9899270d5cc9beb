"""Whole runs by torchrun, by SLURM as its environment variables tell, and by Lightning; mistakes, and Ctrl-C."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from nestmodel.training.ranks import EXIT_INTERRUPTED
from nestmodel.training.saving.checkpoint_files import find_checkpoints
from tests.conftest import MessyCorpora
from tests.distributed.commands import SCRIPTS, fit_command, kill_all, start, wait_for_steps, wait_until_gone
from tests.ports import free_port

STEP = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "nest", "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost"}
STEP |= {"SLURM_NODEID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def without_devices(command: list[str]) -> list[str]:
    at = command.index("--devices")
    return [*command[:at], *command[at + 2 :]]


def torchrun(num_ranks: int, command: list[str]) -> list[str]:
    own = ["--nproc-per-node", str(num_ranks), "--master-port", str(free_port()), "--no-python"]
    return [str(SCRIPTS / "torchrun"), *own, *command]


def error_lines(directory: Path) -> list[str]:
    """Returns what rank 0 says; without a launcher that ends it, another rank repeats it later."""
    return re.findall("^error: (?!another rank).*", (directory / "log").read_text(), re.MULTILINE)


@pytest.mark.smoke
def test_ranks_of_torchrun_find_the_mistake_by_themselves_and_rank_0_prints_it(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    run = start(torchrun(3, fit_command(messy_corpora, tmp_path, 3)), tmp_path)
    assert run.wait(timeout=180) == 1  # torchrun's own
    log = (tmp_path / "log").read_text()
    assert len(error_lines(tmp_path)) == 1, log
    assert re.search(r"Root Cause.*rank +: 0 .*exitcode +: 2 ", log, re.DOTALL), log


def weights(directory: Path, step: int) -> dict[str, torch.Tensor]:
    (path,) = directory.glob(f"run/version_*/checkpoints/step_{step:08d}.ckpt")
    found: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    return found


def finish(command: list[str], directory: Path) -> int:
    """Runs a command until no process is left that it has started, and returns its exit code."""
    run = start(command, directory)
    try:
        run.wait(timeout=300)
        return wait_until_gone(run, directory)
    finally:
        kill_all(run, directory)


@pytest.mark.smoke
@pytest.mark.timeout(600)
def test_torchrun_and_srun_without_devices_train_one_model_as_lightning_does(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    own, by_torchrun, by_srun = (tmp_path / name for name in ("own", "torchrun", "srun"))
    assert finish(fit_command(messy_corpora, own, 2), own) == 0, (own / "log").read_text()
    command = without_devices(fit_command(messy_corpora, by_torchrun, 2))
    assert finish(torchrun(2, command), by_torchrun) == 0, (by_torchrun / "log").read_text()
    command = without_devices(fit_command(messy_corpora, by_srun, 2))
    # As `srun -n 2`, which sets no SLURM_NTASKS_PER_NODE.
    step = {**STEP, "MASTER_PORT": str(free_port())}
    tasks = [start(command, by_srun, **step, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in ("0", "1")]
    assert [task.wait(timeout=300) for task in tasks] == [0, 0], (by_srun / "log").read_text()
    expected = weights(own, 4)
    for directory in (by_torchrun, by_srun):
        assert [path.name for path in (directory / "run").iterdir()] == ["version_0"]
        assert "ranks       2, cpu" in (directory / "log").read_text()
        found = weights(directory, 4)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_ctrl_c_in_a_terminal_saves_a_checkpoint_from_which_two_ranks_resume_exactly(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    flags = ("--data.num_workers", "1", "--trainer.max_steps")
    run = start(fit_command(messy_corpora, tmp_path / "run", 2, *flags, "100000"), tmp_path / "run")
    try:
        wait_for_steps(run, tmp_path / "run")
        os.killpg(run.pid, signal.SIGINT)
        assert wait_until_gone(run, tmp_path / "run") == EXIT_INTERRUPTED
    finally:
        kill_all(run, tmp_path / "run")
    (left,) = find_checkpoints(tmp_path / "run" / "run" / "version_0" / "checkpoints")
    log = (tmp_path / "run" / "log").read_text()
    assert f"interrupted after step {left.step}; continue with the same command and --resume." in log
    assert "stall guard:" not in log
    last = left.step + 2
    for name, resume in (("run", ["--resume"]), ("whole", [])):
        command = fit_command(messy_corpora, tmp_path / name, 2, *flags, str(last), *resume)
        assert start(command, tmp_path / name).wait(timeout=200) == 0, (tmp_path / name / "log").read_text()
    resumed, whole = weights(tmp_path / "run", last), weights(tmp_path / "whole", last)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.faults
def test_ctrl_c_twice_ends_all_processes_at_once(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    flags = ("--data.num_workers", "1", "--trainer.max_steps", "100000")
    run = start(fit_command(messy_corpora, tmp_path, 2, *flags), tmp_path)
    log = tmp_path / "log"
    try:
        wait_for_steps(run, tmp_path)
        os.killpg(run.pid, signal.SIGINT)
        time.sleep(0.05)  # pending signals of one number are merged
        os.killpg(run.pid, signal.SIGINT)
        assert wait_until_gone(run, tmp_path) == EXIT_INTERRUPTED
    finally:
        kill_all(run, tmp_path)
    assert "stall guard:" not in log.read_text()
