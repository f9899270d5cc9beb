import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestguard import EXIT_STALLED
from tests.nestguard.runs import LONG_LIMITS, PATIENCE_S, REPOSITORY, Run, run
from tests.ports import free_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]


def wait_for_monitor(started: Run) -> None:
    started.wait_for_end_of(started.pid("monitor-0"))


def test_a_sleeping_rank_is_reported_and_all_ranks_exit_with_44(tmp_path: Path) -> None:
    with run(tmp_path, world_size=3, fault="sleep", faulty_rank=1, error_files=True) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 3
        wait_for_monitor(started)
        assert started.diagnoses() == {"0": "waiting", "1": "stuck", "2": "waiting"}
        assert "sleep_in_forward" in started.stack("rank-1")
        assert "barrier" in started.stack("rank-0")
        (report,) = started.reports
        assert started.output.startswith((report / "table.txt").read_text().rstrip())
        assert "rank 1 is stuck in FORWARD, step 2" in started.output
        error = json.loads((tmp_path / "error-1.json").read_text())["message"]
        assert error["message"].startswith("stall guard: rank-1, stuck: in FORWARD for")
        assert "sleep_in_forward" in error["extraInfo"]["py_callstack"]
        assert abs(int(error["extraInfo"]["timestamp"]) - time.time()) < 60
        assert not (tmp_path / "error-0.json").exists()
        assert not (tmp_path / "beats-0").exists()


@pytest.mark.parametrize(
    ("fault", "rank", "diagnoses", "function"),
    [
        ("hold_gil", 1, {"0": "waiting", "1": "stuck"}, "hold_the_gil"),
        ("stop", 0, {"0": "stopped", "1": "waiting"}, "in main"),
    ],
)
def test_a_rank_that_runs_no_signal_handler_is_reported_with_its_stack_and_exits(
    tmp_path: Path, fault: str, rank: int, diagnoses: dict[str, str], function: str
) -> None:
    with run(tmp_path, fault=fault, faulty_rank=rank) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 2
        wait_for_monitor(started)
        assert started.diagnoses() == diagnoses
        assert function in started.stack(f"rank-{rank}")


def test_a_killed_rank_is_reported_within_ten_seconds(tmp_path: Path) -> None:
    with run(tmp_path, fault="kill", faulty_rank=0, limits={"step_s": 100.0, "first_step_s": 100.0}) as started:
        assert started.exit_codes(10) == [-signal.SIGKILL, EXIT_STALLED]
        wait_for_monitor(started)
        assert started.diagnoses() == {"0": "dead", "1": "waiting"}
        assert "rank 0 has died in FORWARD, step 2" in started.output


def test_a_rank_that_aborts_is_reported_with_its_signal_and_its_stack_at_that_moment(tmp_path: Path) -> None:
    with run(tmp_path, fault="abort", faulty_rank=1, limits={"step_s": 100.0, "first_step_s": 100.0}) as started:
        assert started.exit_codes() == [EXIT_STALLED, -signal.SIGABRT]
        wait_for_monitor(started)
        assert started.diagnoses() == {"0": "waiting", "1": "dead"}
        reason = {process["rank"]: process["reason"] for process in started.report()["processes"]}[1]
        assert {process["exit_signal"] for process in started.report()["processes"]} == {None, signal.SIGABRT}
        assert reason.startswith("ended in FORWARD by SIGABRT, after ")
        assert "With NCCL, this is probably NCCL's watchdog" in reason
        assert "rank-1, main thread when it crashed, innermost call first:" in started.output
        (report,) = started.reports
        assert (report / "rank-1.crash.txt").read_text().startswith("Fatal Python error: Aborted")
        assert "in inject" in started.output


def test_the_complete_traceback_of_a_failed_rank_is_printed(tmp_path: Path) -> None:
    with run(tmp_path, fault="fail", faulty_rank=1, limits={"step_s": 100.0, "first_step_s": 100.0}) as started:
        assert started.exit_codes() == [EXIT_STALLED, 1]
        wait_for_monitor(started)
        assert started.diagnoses() == {"0": "waiting", "1": "failed"}
        assert "Traceback (most recent call last):" in started.output
        assert "in fail_on_purpose" in started.output
        assert started.output.count("ValueError: injected failure") == 2  # in the table and below it


def test_a_stuck_loader_worker_is_reported_with_its_cut_and_ends(tmp_path: Path) -> None:
    with run(tmp_path, fault="worker", faulty_rank=1) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 2
        wait_for_monitor(started)
        assert started.diagnoses() == {"0": "waiting", "1": "stuck", "1.0": "stuck"}
        assert "worker 0 is stuck, at cut cut-2" in " ".join(started.output.split())
        assert "load_a_broken_cut" in started.stack("rank-1.worker-0")
        started.wait_for_end_of(started.pid("worker"))


def test_a_completed_run_leaves_no_files_and_prints_nothing(tmp_path: Path) -> None:
    with run(tmp_path, steps=20, limits=LONG_LIMITS) as started:
        assert started.exit_codes() == [0, 0]
        wait_for_monitor(started)
        assert started.output == ""
        assert not started.reports
        assert not (tmp_path / "beats-0").exists()
        assert (tmp_path / "was-alive-0").read_text() == "True"


def test_ranks_continue_and_can_tell_that_their_monitor_has_died(tmp_path: Path) -> None:
    with run(tmp_path, steps=40, limits=LONG_LIMITS) as started:
        os.kill(started.pid("monitor-0"), signal.SIGKILL)
        assert started.exit_codes() == [0, 0]
        assert (tmp_path / "was-alive-0").read_text() == "False"


@pytest.mark.slow
def test_two_nodes_print_the_same_table_with_the_stuck_worker_of_one_and_both_end(tmp_path: Path) -> None:
    peers = {"host": "127.0.0.1", "port": free_port(), "run_id": "a"}
    limits = {"step_s": 4.0}  # long enough for the monitors to connect first
    with run(
        tmp_path, world_size=4, nodes=2, fault="worker", faulty_rank=3, peers=peers, limits=limits, passes_token=True
    ) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 4
        for node in (0, 1):
            started.wait_for_end_of(started.pid(f"monitor-{node}"))
        # Each node names its report by its own clock, so node 1 may have the earlier time.
        first, second = sorted(started.reports, key=lambda report: report.name.endswith("-node-1"))
        assert second.name.endswith("-node-1")
        assert (first / "table.txt").read_text() == (second / "table.txt").read_text()
        report = json.loads((first / "stall.json").read_text())
        assert {process["name"]: process["diagnosis"] for process in report["processes"]} == {
            **{f"rank-{rank}": "waiting" for rank in range(3)},
            "rank-3": "stuck",
            "rank-3.worker-0": "stuck",
        }
        assert "load_a_broken_cut" in (first / "rank-3.worker-0.stack.txt").read_text()
        assert "worker 0 is stuck, at cut cut-2" in " ".join(started.output.split())


def test_monitors_without_the_token_of_the_run_cannot_end_it(tmp_path: Path) -> None:
    peers = {"host": "127.0.0.1", "port": free_port()}
    with run(tmp_path, nodes=2, peers=peers, steps=40, limits=LONG_LIMITS, tokens=["one", "another"]) as started:
        assert started.exit_codes() == [0, 0]
        assert "refused a connection from 127.0.0.1" in started.output
        assert not started.reports


_LOSES_ITS_HEARTBEAT = """
import os, sys
from pathlib import Path
from nestguard import Heartbeat, Identity, StallLimits, start_monitor
me = Identity(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="host")
directory = Path(sys.argv[1]) / "beats"
directory.mkdir(mode=0o700)
heartbeat = Heartbeat(directory, me)
heartbeat.arm()
start_monitor(directory, StallLimits(first_step_s=1000), me, Path(sys.argv[1]))
(directory / "rank-0.beat").unlink()
os._exit(0)
"""


def test_a_monitor_ends_with_the_rank_that_started_it_if_the_heartbeat_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LOSES_ITS_HEARTBEAT, str(tmp_path)]
    # Until the monitor has ended, it holds the pipe of stderr.
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "beats").exists()
