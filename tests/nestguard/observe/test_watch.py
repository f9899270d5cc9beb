import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nestguard import Heartbeat, Identity, Phase, StallLimits
from nestguard.diagnose.failures import DEAD_GRACE_S
from nestguard.diagnose.run import diagnose
from nestguard.observe.process import exit_signal, process_state, start_ticks, started_ns
from nestguard.observe.view import ProcessState
from nestguard.observe.watch import NodeWatch, crash_signal
from tests.nestguard.runs import PATIENCE_S

ME = Identity(rank=2, local_rank=0, node_rank=1, world_size=4, local_world_size=2, host="gpu-b")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def state_of(process: subprocess.Popen[bytes], started: int) -> ProcessState:
    return process_state(process.pid, started)


def reaches(process: subprocess.Popen[bytes], started: int, state: ProcessState) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while state_of(process, started) is not state and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(process, started) is state


@pytest.mark.multiprocess
def test_process_state_reports_stopped_zombie_and_gone(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_ticks(sleeper.pid)
    assert started is not None
    assert not state_of(sleeper, started).has_ended
    assert state_of(sleeper, started + 1) is ProcessState.GONE  # another process that had the same pid
    sleeper.send_signal(signal.SIGSTOP)
    assert reaches(sleeper, started, ProcessState.STOPPED)
    sleeper.kill()
    assert reaches(sleeper, started, ProcessState.ZOMBIE)
    sleeper.wait()
    assert reaches(sleeper, started, ProcessState.GONE)
    assert start_ticks(sleeper.pid) is None


@pytest.mark.multiprocess
def test_the_signal_that_ended_a_process_is_known_until_its_parent_reaps_it(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_ticks(sleeper.pid)
    assert started is not None
    assert exit_signal(sleeper.pid, started) is None
    sleeper.kill()
    assert reaches(sleeper, started, ProcessState.ZOMBIE)
    assert exit_signal(sleeper.pid, started) == signal.SIGKILL
    assert exit_signal(sleeper.pid, started + 1) is None
    sleeper.wait()
    assert exit_signal(sleeper.pid, started) is None


def test_a_process_that_exits_by_itself_has_no_exit_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(44)"]) as process:
        started = start_ticks(process.pid)
        assert started is not None
        assert reaches(process, started, ProcessState.ZOMBIE)
        assert exit_signal(process.pid, started) is None


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_crash_dump_names_its_signal(tmp_path: Path, number: int) -> None:
    program = f"import faulthandler, os; faulthandler.enable(open('dump', 'w')); os.kill(os.getpid(), {number})"
    assert subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path).returncode == -number
    assert crash_signal((tmp_path / "dump").read_text().splitlines()[0]) == number


def test_another_first_line_names_no_signal() -> None:
    assert crash_signal("") is None
    assert crash_signal("Fatal Python error: Unknown") is None


def test_start_time_of_a_process_uses_the_clock_of_heartbeats() -> None:
    started = started_ns(os.getpid())
    assert started is not None
    assert 0 < time.monotonic_ns() - started < 24 * 3600 * 10**9


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


@pytest.mark.multiprocess
def test_a_monitor_that_notices_late_names_the_killed_rank_not_the_one_that_failed_because_of_it(
    tmp_path: Path,
) -> None:
    program = f"""
import time
from pathlib import Path
from nestguard import Heartbeat, Identity
Heartbeat(Path({str(tmp_path)!r}), Identity(
    rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, host="gpu-b"))
print("started", flush=True)
time.sleep(300)
"""
    watch, failing = NodeWatch(tmp_path, ME), Heartbeat(tmp_path, ME)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"started\n"
        assert not any(view.state.has_ended for view in watch.scan())
        killed.kill()
    failing.finish(Phase.FAILED, "ConnectionError: reset by peer")
    time.sleep(0.5)  # the monitor's delay
    watch.wait(1)
    time.sleep(DEAD_GRACE_S)
    diagnosis = diagnose(watch.scan(), StallLimits())
    assert [process.is_culprit for process in diagnosis.diagnoses] == [False, True]
    assert diagnosis.cause.startswith("rank 3 has died")
