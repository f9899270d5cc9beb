import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

import nestguard.observe.directory
from nestguard import (
    GuardError,
    Heartbeat,
    Identity,
    MonitorHandle,
    Phase,
    StallLimits,
    read_heartbeat,
    run_directory,
    start_monitor,
    start_worker,
)
from nestguard.observe.directory import lock_directory
from nestguard.observe.heartbeat import HeartbeatSlot
from tests.nestguard.runs import PATIENCE_S, wait_until

ME = Identity(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="gpu-a")
HOME = f"nestguard-{os.geteuid()}"
NOBODY = 65534


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm: every user may write there. The directory for temporary files is beside it."""
    place = tmp_path / "shm"
    place.mkdir()
    place.chmod(0o1777)
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setattr(nestguard.observe.directory, "_SHARED_MEMORY", place)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return place


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory with a file that an attacker wants to be overwritten."""
    directory = tmp_path / "victim"
    directory.mkdir(mode=0o700)
    for name in ("rank-0.beat", "rank-0.stack.txt"):
        (directory / name).write_text("precious")
    return directory


def is_unharmed(victim: Path) -> bool:
    return {path.name: path.read_text() for path in victim.iterdir()} == {
        "rank-0.beat": "precious",
        "rank-0.stack.txt": "precious",
    }


def write_all_files(directory: Path) -> None:
    """Makes a rank write every file that it can write."""
    heartbeat = Heartbeat(directory, ME)
    heartbeat.arm()
    heartbeat.beat(Phase.FORWARD, 1, 0)
    heartbeat.finish(Phase.FAILED, "an error", "a traceback")
    heartbeat.close()


def test_a_run_has_a_directory_that_only_its_user_may_enter(shared: Path) -> None:
    with run_directory("run/7", ME) as directory:
        assert directory == shared / HOME / "run-7-node-0"
        for path in (directory, directory.parent):
            assert path.lstat().st_mode & 0o777 == 0o700
            assert path.lstat().st_uid == os.geteuid()
        heartbeat = Heartbeat(directory, ME)
    assert read_heartbeat(directory / "rank-0.beat") is not None
    heartbeat.close()
    assert list((shared / HOME).iterdir()) == []


def link_to(victim: Path, path: Path) -> None:
    path.symlink_to(victim)


def give_away(_victim: Path, path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory to another user")
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


def open_to_all(_victim: Path, path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


ATTACKS = {
    link_to: "is a link or a file, not a directory",
    give_away: f"belongs to user {NOBODY}, not to this user",
    open_to_all: "is open to other users: its mode is 0777, not 0700",
}


@pytest.mark.parametrize(("attack", "problem"), ATTACKS.items())
def test_a_directory_that_another_user_has_prepared_is_not_used(
    shared: Path, victim: Path, caplog: pytest.LogCaptureFixture, attack: Callable[[Path, Path], None], problem: str
) -> None:
    attack(victim, shared / HOME)
    with caplog.at_level(logging.WARNING), run_directory("run", ME) as directory:
        assert directory == Path(tempfile.gettempdir()) / HOME / "run-node-0"
        write_all_files(directory)
    assert is_unharmed(victim)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{shared / HOME} {problem}")
    assert f"Remove {shared / HOME}, or ask its owner" in record.getMessage()
    assert record.getMessage().endswith(f"Heartbeats are written to {directory.parent} instead.")


@pytest.mark.parametrize("attack", [link_to, open_to_all])
def test_a_heartbeat_is_not_written_to_the_directory_of_somebody_else(
    tmp_path: Path, victim: Path, attack: Callable[[Path, Path], None]
) -> None:
    attack(victim, tmp_path / "beats")
    with pytest.raises(GuardError, match=f"Remove {tmp_path / 'beats'}, or ask its owner"):
        Heartbeat(tmp_path / "beats", ME)
    with pytest.raises(GuardError):
        start_monitor(tmp_path / "beats", StallLimits(), ME, tmp_path)
    assert is_unharmed(victim)


def test_without_a_safe_place_there_is_one_error_that_says_what_to_do(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared / HOME).touch()
    monkeypatch.setattr(tempfile, "tempdir", str(shared / "missing"))
    with pytest.raises(GuardError, match=r"nestguard-\d+ is a link .* Set TMPDIR to a directory of your own"):
        run_directory("run", ME).__enter__()


def test_a_place_in_which_others_could_rename_the_directory_is_not_used(shared: Path) -> None:
    shared.chmod(0o777)
    with run_directory("run", ME) as directory:
        assert directory.parent == Path(tempfile.gettempdir()) / HOME
    assert list(shared.iterdir()) == []


def test_links_in_the_directory_are_replaced_and_not_followed(tmp_path: Path, victim: Path) -> None:
    beats = tmp_path / "beats"
    beats.mkdir(mode=0o700)
    for name in ("beat", "stack.txt", "crash.txt", "traceback.txt"):
        (beats / f"rank-0.{name}").symlink_to(victim / "rank-0.beat")
    (beats / f".rank-0.{os.getpid()}.partial").symlink_to(victim / "rank-0.beat")
    write_all_files(beats)
    assert is_unharmed(victim)


def test_a_link_or_a_pipe_is_not_read_as_a_heartbeat(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beats", ME)
    (tmp_path / "link").symlink_to(tmp_path / "beats" / "rank-0.beat")
    os.mkfifo(tmp_path / "pipe")
    assert read_heartbeat(tmp_path / "beats" / "rank-0.beat") is not None
    assert read_heartbeat(tmp_path / "link") is None
    assert read_heartbeat(tmp_path / "pipe") is None
    heartbeat.close()


def test_the_last_to_leave_removes_only_files_of_the_stall_guard(tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    lock = lock_directory(beats)
    write_all_files(beats)
    (beats / "rank-0.notes.txt").touch()
    assert (beats / "rank-0.beat").exists()
    lock.release()
    assert [path.name for path in beats.iterdir()] == ["rank-0.notes.txt"]


def test_a_loader_worker_does_not_create_the_directory_of_its_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_worker(0, 1, HeartbeatSlot(tmp_path / "beats", ME))
    assert "runs without a heartbeat" in caplog.text
    assert not (tmp_path / "beats").exists()


RANK = """
import sys
from pathlib import Path
import nestguard.observe.directory
from nestguard import Heartbeat, Identity, run_directory
nestguard.observe.directory._SHARED_MEMORY = Path(sys.argv[1])
identity = Identity(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="gpu-a")
with run_directory(sys.argv[2], identity) as directory:
    heartbeat = Heartbeat(directory, identity)
    heartbeat.arm()
print(directory, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_rank(shared: Path) -> Iterator[Callable[[str], tuple["subprocess.Popen[str]", Path]]]:
    ranks: list[subprocess.Popen[str]] = []

    def start(run_id: str) -> tuple["subprocess.Popen[str]", Path]:
        command = [sys.executable, "-c", RANK, str(shared), run_id]
        rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ranks.append(rank)
        assert rank.stdout is not None
        return rank, Path(rank.stdout.readline().strip())

    yield start
    for rank in ranks:
        rank.kill()
        rank.communicate()


@pytest.mark.multiprocess
def test_a_start_removes_the_directories_of_killed_runs_and_keeps_those_in_use(
    shared: Path, start_rank: Callable[[str], tuple["subprocess.Popen[str]", Path]]
) -> None:
    _, living = start_rank("living")
    killed, left = start_rank("killed")
    killed.kill()
    killed.wait()
    assert (left / "rank-0.beat").exists()
    with run_directory("next", ME) as directory:
        assert {path.name for path in (shared / HOME).iterdir()} == {living.name, directory.name}
        assert (living / "rank-0.beat").exists()


def monitor_in(directory: Path, reports: Path) -> MonitorHandle:
    return start_monitor(directory, StallLimits(step_s=100, first_step_s=100), ME, reports)


@pytest.mark.multiprocess
def test_a_monitor_survives_a_signal_to_the_whole_job_and_removes_the_files(shared: Path, tmp_path: Path) -> None:
    with run_directory("run", ME) as directory:
        heartbeat = Heartbeat(directory, ME)
        monitor = monitor_in(directory, tmp_path / "reports")
    os.kill(monitor.pid, signal.SIGTERM)  # before it has started to run Python code
    assert monitor.is_alive()
    heartbeat.finish(Phase.LEAVING)
    heartbeat.close()
    assert directory.exists()  # the monitor has a lock from its first moment on
    assert monitor.wait(PATIENCE_S)
    assert list((shared / HOME).iterdir()) == []


@pytest.mark.multiprocess
def test_the_last_rank_removes_the_files_if_the_monitor_was_killed(shared: Path, tmp_path: Path) -> None:
    with run_directory("run", ME) as directory:
        heartbeat = Heartbeat(directory, ME)
        other = Heartbeat(directory, Identity(**{**asdict(ME), "rank": 1, "local_rank": 1, "local_world_size": 2}))
        monitor = monitor_in(directory, tmp_path / "reports")
    os.kill(monitor.pid, signal.SIGKILL)
    assert monitor.wait(PATIENCE_S)
    heartbeat.close()
    assert sorted(path.name for path in directory.iterdir()) == ["rank-0.beat", "rank-1.beat"]
    other.close()
    wait_until(lambda: not list((shared / HOME).iterdir()), PATIENCE_S)
