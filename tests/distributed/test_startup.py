"""Signals two ranks during their start: no process may be left."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nestguard import Identity, run_directory
from nestmodel.training.stopping.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED
from tests.conftest import MessyCorpora
from tests.distributed.test_command_line import start
from tests.nestguard.runs import wait_until

LONGEST_START_S = 120
NUM_MOMENTS = 5
END_PATIENCE_S = 60
"""Processes end within ten seconds of a signal on an idle machine; a busy one gets longer."""

MARKER = "NESTMODEL_TEST_START"


def processes_of(name: str) -> list[int]:
    """Returns all processes that inherited a marker from the start of a run, zombies excluded."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"{MARKER}={name}\0".encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def ranks_of(pids: list[int]) -> list[int]:
    """Returns the processes that are ranks, not monitors or helper processes of Python."""
    ranks = []
    for pid in pids:
        try:
            if b"nestmodel\0fit\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ranks.append(pid)
        except OSError:
            continue
    return ranks


def has_trained(directory: Path) -> bool:
    metrics = directory / "run" / "version_0" / "metrics.csv"
    return metrics.exists() and len(metrics.read_text().splitlines()) > 1


def signal_ranks(run: "subprocess.Popen[bytes]", name: str, target: str, number: signal.Signals) -> bool:
    """Sends a signal to the chosen ranks; returns False if the other rank does not exist yet."""
    ranks = ranks_of(processes_of(name))
    chosen = {"main": [run.pid], "other": [pid for pid in ranks if pid != run.pid], "all": ranks or [run.pid]}[target]
    for pid in chosen:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    return bool(chosen)


def wait_until_gone(run: "subprocess.Popen[bytes]", name: str, log: Path) -> int:
    deadline = time.monotonic() + END_PATIENCE_S
    while time.monotonic() < deadline:
        code = run.poll()
        if code is not None and not processes_of(name):
            return code
        time.sleep(0.1)
    raise AssertionError(f"left behind: {processes_of(name)}, exit code {run.poll()}\n{log.read_text()}")


def begin(corpora: MessyCorpora, directory: Path) -> "subprocess.Popen[bytes]":
    """Starts a run of so many steps that it does not end before it is signalled."""
    directory.mkdir()
    return start(corpora, directory, "--max-steps", "1000000", "--log-every-n-steps", "1")


def wait_until_trained(run: "subprocess.Popen[bytes]", directory: Path) -> None:
    deadline = time.monotonic() + LONGEST_START_S
    while not has_trained(directory):
        assert time.monotonic() < deadline, (directory / "log").read_text()
        assert run.poll() is None, (directory / "log").read_text()
        time.sleep(0.1)


def kill_all(run: "subprocess.Popen[bytes]", name: str) -> None:
    for pid in processes_of(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.wait()


def directories_of(pids: Sequence[int]) -> list[str]:
    """Starts another run, and returns the directories of heartbeats that are left from those of these processes."""
    identity = Identity(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="here")
    with run_directory(str(os.getpid()), identity) as directory:
        return [path.name for pid in pids for path in directory.parent.glob(f"{pid}-*")]


@pytest.fixture(scope="module")
def start_s(messy_corpora: MessyCorpora, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds from the start of a run to its first optimizer step, on this machine."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(MARKER, str(directory))
        began_s = time.monotonic()
        run = begin(messy_corpora, directory)
        try:
            wait_until_trained(run, directory)
            return time.monotonic() - began_s
        finally:
            kill_all(run, str(directory))


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("target", "number"),
    [("main", signal.SIGTERM), ("main", signal.SIGKILL), ("other", signal.SIGTERM), ("all", signal.SIGINT)],
)
def test_a_signal_at_any_time_of_a_start_leaves_no_process_behind(
    messy_corpora: MessyCorpora,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start_s: float,
    target: str,
    number: signal.Signals,
) -> None:
    # Moments that are spread over the start. The last one is the first step.
    pids = []
    for i, moment_s in enumerate([*np.linspace(0.5, start_s, NUM_MOMENTS).tolist(), None]):
        directory = tmp_path / str(i)
        name = str(directory)
        monkeypatch.setenv(MARKER, name)
        run = begin(messy_corpora, directory)
        pids.append(run.pid)
        try:
            if moment_s is None:
                wait_until_trained(run, directory)
            else:
                time.sleep(moment_s)
            is_signalled = signal_ranks(run, name, target, number)
            assert is_signalled or moment_s is not None, "there is no second rank"
            if is_signalled:
                code = wait_until_gone(run, name, directory / "log")
                assert code != 0, (moment_s, (directory / "log").read_text())
                if moment_s is None and number != signal.SIGKILL:
                    assert code == {signal.SIGTERM: EXIT_PREEMPTED, signal.SIGINT: EXIT_INTERRUPTED}[number]
        finally:
            kill_all(run, name)
    wait_until(lambda: not directories_of(pids), END_PATIENCE_S)
