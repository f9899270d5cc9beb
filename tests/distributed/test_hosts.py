"""Faults of a whole machine: two network namespaces stand for two machines, connected by a virtual cable."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nestguard import EXIT_STALLED
from tests.conftest import MessyCorpora
from tests.distributed.runs import Run, monitors
from tests.network.nodes import Node, two_nodes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.faults]

LIMITS = {"step_s": 8.0, "first_step_s": 90.0, "node_silence_s": 6.0}


@pytest.fixture
def hosts() -> Iterator[Sequence[Node]]:
    with two_nodes() as network:
        yield network.nodes


def signal_host(host: Node, number: signal.Signals) -> None:
    """Sends a signal to every process of a host, first to its monitor, which would otherwise report the others."""
    first = monitors()
    for pid in sorted(host.pids(), key=lambda pid: pid not in first):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def disturb(run: Run, host: Node, what: str) -> None:
    """Waits until the run has made three steps, then kills or freezes a host."""
    while not run.directory.exists() or len(run.losses()) < 3:
        time.sleep(0.2)
    time.sleep(3)  # until the monitors are connected
    if what == "killed":
        signal_host(host, signal.SIGKILL)
    else:
        signal_host(host, signal.SIGSTOP)
        time.sleep(30)
        signal_host(host, signal.SIGCONT)


@pytest.mark.parametrize("what", ["frozen", "killed"])
def test_a_lost_host_is_reported_and_both_hosts_end(
    messy_corpora: MessyCorpora, tmp_path: Path, hosts: Sequence[Node], what: str
) -> None:
    run = Run(
        corpora=messy_corpora,
        directory=tmp_path / "run",
        max_steps=100_000,
        every_n_steps=100_000,
        world_size=2,
        hosts=hosts,
        limits=LIMITS,
        patience_s=60.0,
    )
    disturbing = threading.Thread(target=disturb, args=(run, hosts[1], what), daemon=True)
    disturbing.start()
    codes = run.start()
    assert codes[0] in (1, EXIT_STALLED), run.log(0)
    expected = "no message from node 1 (host node-b) for"
    if what == "killed":
        assert codes[1] == -signal.SIGKILL, run.log(1)
        expected = "no contact with rank 1; rank 0 has failed"
    # A failed rank may have ended before its monitor has written the report, the table first and then the log.
    end = time.monotonic() + 20
    while f"stall guard: {expected}" not in run.log(0) and time.monotonic() < end:
        time.sleep(0.1)
    assert f"stall guard: {expected}" in run.log(0)
    tables = [path.read_text() for path in (run.directory / "stalls").glob("*/table.txt")]
    assert any(expected in table for table in tables), tables
    disturbing.join(timeout=60)


def test_a_run_that_torchrun_restarts_on_both_hosts_equals_an_uninterrupted_one(
    messy_corpora: MessyCorpora, tmp_path: Path, hosts: Sequence[Node]
) -> None:
    plain = Run(corpora=messy_corpora, directory=tmp_path / "plain", max_steps=5, world_size=2)
    assert plain.start() == [0, 0], plain.log(0)
    run = Run(corpora=messy_corpora, directory=tmp_path / "run", max_steps=5, world_size=2, hosts=hosts, limits=LIMITS)
    codes, output = run.start_by_torchrun({1: ("kill", 2, 2)})
    assert codes == [0, 0], output
    assert "rank 1 has died" in output, output
    assert run.seen() == plain.seen()
    assert run.state() == plain.state()
