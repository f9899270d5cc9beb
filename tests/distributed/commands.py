"""Starts `nestmodel fit` on a tiny model as a user does, and ends all of its processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from nestmodel.training.ranks import STARTER
from tests.conftest import MessyCorpora
from tests.distributed.runs import REPOSITORY
from tests.slurm.reaper import processes_with
from tests.training import TINY

SCRIPTS = Path(sys.executable).parent
LONGEST_START_S = 600
END_PATIENCE_S = 60
"""Processes end within ten seconds of a signal on an idle machine; a busy one gets longer."""

_MARKER = "NESTMODEL_TEST_START"
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", STARTER)


def fit_command(corpora: MessyCorpora, directory: Path, devices: int, *flags: str, **sections: Any) -> list[str]:
    """Returns a command for a run in `directory/run`; sections of the configuration replace those of `TINY`."""
    directory.mkdir(exist_ok=True)
    (directory / "tiny.yaml").write_text(yaml.safe_dump({**TINY, **sections}))
    command = [str(SCRIPTS / "nestmodel"), "fit", "--config", "tiny.yaml", str(corpora.speech)]
    command += ["--accelerator", "cpu", "--devices", str(devices), "--output", "run"]
    return [*command, *(["--trainer.strategy", "ddp"] if devices > 1 else []), *flags]


def start(command: Sequence[str], directory: Path, **variables: str) -> "subprocess.Popen[bytes]":
    """Starts a command in a process group of its own, as a shell does, with its output in `directory/log`."""
    environment = {
        name: value for name, value in os.environ.items() if name not in _LAUNCHER and not name.startswith("SLURM")
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), _MARKER: str(directory), **variables}
    with (directory / "log").open("a") as log:
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True)


def processes_of(directory: Path) -> list[int]:
    """Returns all processes of what was started in a directory, zombies excluded."""
    return processes_with(f"{_MARKER}={directory}")


def ranks_of(directory: Path) -> list[int]:
    """Returns the processes that are ranks, not monitors or helper processes of Python."""
    ranks = []
    for pid in processes_of(directory):
        with contextlib.suppress(OSError):
            if b"nestmodel\0fit\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ranks.append(pid)
    return ranks


def wait_for_steps(run: "subprocess.Popen[bytes]", directory: Path, number: int = 2) -> None:
    """Waits until a run has logged this number of steps."""
    metrics, deadline = directory / "run" / "version_0" / "metrics.csv", time.monotonic() + LONGEST_START_S
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > number):
        assert run.poll() is None, (directory / "log").read_text()
        assert time.monotonic() < deadline, (directory / "log").read_text()
        time.sleep(0.1)


def wait_until_gone(run: "subprocess.Popen[bytes]", directory: Path) -> int:
    """Waits until no process is left, and returns the exit code of the first one."""
    deadline = time.monotonic() + END_PATIENCE_S
    while time.monotonic() < deadline:
        code = run.poll()
        if code is not None and not processes_of(directory):
            return code
        time.sleep(0.1)
    log = (directory / "log").read_text()
    raise AssertionError(f"left behind: {processes_of(directory)}, exit code {run.poll()}\n{log}")


def kill_all(run: "subprocess.Popen[bytes]", directory: Path) -> None:
    for pid in processes_of(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.wait()
