"""Signals two ranks during their start: no process may be left."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nestguard import Identity, run_directory
from nestmodel.training.ranks import EXIT_INTERRUPTED, EXIT_PREEMPTED
from tests.conftest import MessyCorpora
from tests.distributed.commands import (
    END_PATIENCE_S,
    fit_command,
    kill_all,
    ranks_of,
    start,
    wait_for_steps,
    wait_until_gone,
)
from tests.nestguard.runs import wait_until

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.faults]

NUM_MOMENTS = 5


def begin(corpora: MessyCorpora, directory: Path) -> "subprocess.Popen[bytes]":
    """Starts a run that lasts until it is signalled."""
    return start(fit_command(corpora, directory, 2, "--max-steps", "1000000"), directory)


def signal_ranks(run: "subprocess.Popen[bytes]", directory: Path, target: str, number: signal.Signals) -> bool:
    """Sends a signal to the chosen ranks; returns False if the other rank does not exist yet."""
    ranks = ranks_of(directory)
    chosen = {"main": [run.pid], "other": [pid for pid in ranks if pid != run.pid], "all": ranks or [run.pid]}[target]
    for pid in chosen:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    return bool(chosen)


def directories_of(pids: Sequence[int]) -> list[str]:
    """Starts another run, and returns the directories of heartbeats that are left from those of these processes."""
    identity = Identity(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="here")
    with run_directory(str(os.getpid()), identity) as directory:
        return [path.name for pid in pids for path in directory.parent.glob(f"{pid}-*")]


@pytest.fixture(scope="module")
def start_s(messy_corpora: MessyCorpora, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds from the start of a run to its first optimizer step, on this machine."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    began_s = time.monotonic()
    run = begin(messy_corpora, directory)
    try:
        wait_for_steps(run, directory, 1)
        return time.monotonic() - began_s
    finally:
        kill_all(run, directory)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("target", "number"),
    [("main", signal.SIGTERM), ("main", signal.SIGKILL), ("other", signal.SIGTERM), ("all", signal.SIGINT)],
)
def test_a_signal_at_any_time_of_a_start_leaves_no_process_behind(
    messy_corpora: MessyCorpora, tmp_path: Path, start_s: float, target: str, number: signal.Signals
) -> None:
    # Moments that are spread over the start. The last one is the first step.
    pids = []
    for i, moment_s in enumerate([*np.linspace(0.5, start_s, NUM_MOMENTS).tolist(), None]):
        directory = tmp_path / str(i)
        run = begin(messy_corpora, directory)
        pids.append(run.pid)
        try:
            if moment_s is None:
                wait_for_steps(run, directory, 1)
            else:
                time.sleep(moment_s)
            is_signalled = signal_ranks(run, directory, target, number)
            assert is_signalled or moment_s is not None, "there is no second rank"
            if is_signalled:
                code = wait_until_gone(run, directory)
                assert code != 0, (moment_s, (directory / "log").read_text())
                if moment_s is None and number != signal.SIGKILL:
                    assert code == {signal.SIGTERM: EXIT_PREEMPTED, signal.SIGINT: EXIT_INTERRUPTED}[number]
        finally:
            kill_all(run, directory)
    wait_until(lambda: not directories_of(pids), END_PATIENCE_S)
