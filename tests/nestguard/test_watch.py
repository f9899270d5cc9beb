import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nestguard import Heartbeat, Identity, Phase
from nestguard.process import ProcessState, process_state, start_ticks, started_ns
from nestguard.watch import NodeWatch

ME = Identity(rank=2, local_rank=0, node_rank=1, world_size=4, local_world_size=2, host="gpu-b")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def state_of(process: subprocess.Popen[bytes], started: int) -> ProcessState:
    return process_state(process.pid, started)


def becomes(process: subprocess.Popen[bytes], started: int, state: ProcessState) -> bool:
    deadline = time.monotonic() + 45  # a busy machine may be slow; a test that passes does not wait for it
    while state_of(process, started) is not state and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(process, started) is state


@pytest.mark.multiprocess
def test_a_process_is_seen_to_be_stopped_a_zombie_and_gone(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_ticks(sleeper.pid)
    assert started is not None
    assert not state_of(sleeper, started).has_ended
    assert state_of(sleeper, started + 1) is ProcessState.GONE  # another process with the same number
    sleeper.send_signal(signal.SIGSTOP)
    assert becomes(sleeper, started, ProcessState.STOPPED)
    sleeper.kill()
    assert becomes(sleeper, started, ProcessState.ZOMBIE)
    sleeper.wait()
    assert becomes(sleeper, started, ProcessState.GONE)
    assert start_ticks(sleeper.pid) is None


def test_the_start_of_a_process_is_told_by_the_clock_of_beats() -> None:
    started = started_ns(os.getpid())
    assert started is not None
    assert 0 < time.monotonic_ns() - started < 24 * 3600 * 10**9


def test_ranks_are_expected_before_they_are_seen(tmp_path: Path) -> None:
    watch = NodeWatch(tmp_path, ME)
    missing = watch.look()
    assert [view.rank for view in missing] == [2, 3]
    assert {view.state for view in missing} == {ProcessState.NOT_STARTED}
    Heartbeat(tmp_path, replace(ME, rank=3, local_rank=1))
    states = {view.rank: view.state for view in watch.look()}
    assert states[2] is ProcessState.NOT_STARTED
    assert states[3] in (ProcessState.RUNNING, ProcessState.SLEEPING)


def test_age_is_that_of_the_last_sign_of_life_whatever_the_wall_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Heartbeat(tmp_path, replace(ME, local_world_size=1))
    heartbeat.beat(Phase.FORWARD, 1)
    watch = NodeWatch(tmp_path, replace(ME, local_world_size=1))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    time.sleep(1)
    (before,) = watch.look()
    assert 1 <= before.age_s < 30
    heartbeat.alive()
    (view,) = watch.look()
    assert view.age_s < before.age_s


def test_time_in_which_the_watch_itself_stood_still_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heartbeat(tmp_path, replace(ME, local_world_size=1))
    watch = NodeWatch(tmp_path, replace(ME, local_world_size=1))
    watch.look()
    now = time.monotonic_ns() + 1000 * 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    (view,) = watch.look()
    assert view.age_s == 0
    now += 3 * 10**9
    (view,) = watch.look()
    assert view.age_s == pytest.approx(3)


@pytest.mark.multiprocess
def test_what_is_left_over_from_another_run_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"""
from pathlib import Path
from nestguard import Heartbeat, Identity
Heartbeat(Path({str(tmp_path)!r}), Identity(
    rank=2, local_rank=0, node_rank=1, world_size=4, local_world_size=1, host="gpu-b"))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    one = replace(ME, local_world_size=1)
    (view,) = NodeWatch(tmp_path, one).look()
    assert view.is_dead  # it began after this process, so it is of this run
    now = time.monotonic_ns()
    monkeypatch.setattr("nestguard.watch.started_ns", lambda _: now)
    (view,) = NodeWatch(tmp_path, one).look()
    assert view.state is ProcessState.NOT_STARTED


def test_files_of_the_run_are_removed_and_others_are_not(tmp_path: Path) -> None:
    watch = NodeWatch(tmp_path, replace(ME, local_world_size=1))
    Heartbeat(tmp_path, ME)
    watch.look()
    (tmp_path / "notes.txt").touch()
    watch.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
