import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nestguard import Heartbeat, Identity, Phase
from nestguard.observe.process import exit_signal, process_state, start_ticks
from nestguard.observe.view import ProcessState
from nestguard.observe.watch import NodeWatch
from tests.nestguard.runs import PATIENCE_S, wait_until

ME = Identity(rank=2, local_rank=0, node_rank=1, world_size=4, local_world_size=2, host="gpu-b")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.mark.multiprocess
def test_the_state_of_a_process_and_the_signal_that_ended_it(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_ticks(sleeper.pid)
    assert started is not None

    def reaches(state: ProcessState) -> bool:
        wait_until(lambda: process_state(sleeper.pid, started) is state, PATIENCE_S)
        return True

    assert not process_state(sleeper.pid, started).has_ended
    assert process_state(sleeper.pid, started + 1) is ProcessState.GONE  # another process that had the same pid
    sleeper.send_signal(signal.SIGSTOP)
    assert reaches(ProcessState.STOPPED)
    assert exit_signal(sleeper.pid, started) is None
    sleeper.kill()
    assert reaches(ProcessState.ZOMBIE)
    assert exit_signal(sleeper.pid, started) == signal.SIGKILL
    assert exit_signal(sleeper.pid, started + 1) is None
    sleeper.wait()
    assert reaches(ProcessState.GONE)
    assert start_ticks(sleeper.pid) is None
    assert exit_signal(sleeper.pid, started) is None


@pytest.mark.multiprocess
def test_an_abort_is_known_although_the_process_was_reaped(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from nestguard import Heartbeat, Identity
Heartbeat(Path({str(tmp_path)!r}), Identity(
    rank=2, local_rank=0, node_rank=1, world_size=4, local_world_size=1, host="gpu-b")).arm()
os.abort()
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S).returncode == -signal.SIGABRT
    (view,) = NodeWatch(tmp_path, replace(ME, local_world_size=1)).scan()
    assert view.exit_signal == signal.SIGABRT


def test_expected_ranks_without_a_heartbeat_are_not_started(tmp_path: Path) -> None:
    watch = NodeWatch(tmp_path, ME)
    missing = watch.scan()
    assert [view.rank for view in missing] == [2, 3]
    assert {view.state for view in missing} == {ProcessState.NOT_STARTED}
    Heartbeat(tmp_path, replace(ME, rank=3, local_rank=1))
    states = {view.rank: view.state for view in watch.scan()}
    assert states[2] is ProcessState.NOT_STARTED
    assert states[3] in (ProcessState.RUNNING, ProcessState.SLEEPING)


def test_age_counts_from_the_last_heartbeat_and_ignores_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    monkeypatch.setattr("nestguard.observe.heartbeat._now", lambda: now)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    watch = NodeWatch(tmp_path, replace(ME, local_world_size=1))
    heartbeat = Heartbeat(tmp_path, replace(ME, local_world_size=1))
    heartbeat.beat(Phase.FORWARD, 1)
    now += 3 * 10**9
    (view,) = watch.scan()
    assert view.age_s == 3
    heartbeat.refresh()
    now += 2 * 10**9
    (view,) = watch.scan()
    assert view.age_s == 2


def test_time_in_which_the_monitor_was_suspended_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heartbeat(tmp_path, replace(ME, local_world_size=1))
    watch = NodeWatch(tmp_path, replace(ME, local_world_size=1))
    watch.scan()
    now = time.monotonic_ns() + 1000 * 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    (view,) = watch.scan()
    assert view.age_s == 0
    now += 3 * 10**9
    (view,) = watch.scan()
    assert view.age_s == pytest.approx(3)


@pytest.mark.multiprocess
def test_heartbeats_left_over_from_another_run_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"""
from pathlib import Path
from nestguard import Heartbeat, Identity
Heartbeat(Path({str(tmp_path)!r}), Identity(
    rank=2, local_rank=0, node_rank=1, world_size=4, local_world_size=1, host="gpu-b"))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    one = replace(ME, local_world_size=1)
    (view,) = NodeWatch(tmp_path, one).scan()
    assert view.is_dead  # it started after this process, so it belongs to this run
    now = time.monotonic_ns()
    monkeypatch.setattr("nestguard.observe.watch.started_ns", lambda _: now)
    (view,) = NodeWatch(tmp_path, one).scan()
    assert view.state is ProcessState.NOT_STARTED


WRITER = """
import json, sys, time
from pathlib import Path
from nestguard import Heartbeat, Identity, Phase
heartbeat = Heartbeat(Path(sys.argv[1]), Identity(**json.loads(sys.argv[2])))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.multiprocess
def test_a_node_whose_ranks_are_all_stopped_is_suspended(tmp_path: Path) -> None:
    directory = tmp_path / "beats"
    directory.mkdir(mode=0o700)
    watch, ranks = NodeWatch(directory, ME), []
    try:
        for local_rank in range(2):
            identity = json.dumps(asdict(replace(ME, rank=2 + local_rank, local_rank=local_rank)))
            command = [sys.executable, "-c", WRITER, str(directory), identity]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]))
            assert ranks[-1].stdout is not None
            assert ranks[-1].stdout.readline() == b"ready\n"
        ranks[0].send_signal(signal.SIGSTOP)
        wait_until(lambda: any(view.state is ProcessState.STOPPED for view in watch.scan()), PATIENCE_S)
        assert not watch.is_suspended
        assert max(view.age_s for view in watch.scan()) > 0
        ranks[1].send_signal(signal.SIGSTOP)
        wait_until(lambda: bool(watch.scan()) and watch.is_suspended, PATIENCE_S)
        time.sleep(0.2)
        assert [view.age_s for view in watch.scan()] == [0.0, 0.0]
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        wait_until(lambda: bool(watch.scan()) and not watch.is_suspended, PATIENCE_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
