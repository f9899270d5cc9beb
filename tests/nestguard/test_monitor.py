import json
import os
import signal
import time
from pathlib import Path

import pytest

from nestguard import EXIT_STALLED
from tests.nestguard.runs import PATIENCE_S, PATIENT, Run, have_met, run, wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]


def nothing_is_left(started: Run) -> None:
    started.wait_for_end_of(started.pid("monitor-0"))


def test_a_rank_that_sleeps_is_named_and_all_ranks_end_with_the_documented_code(tmp_path: Path) -> None:
    with run(tmp_path, world_size=3, misdeed="sleep", who=1, error_files=True) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 3
        nothing_is_left(started)
        assert started.verdicts() == {"0": "waiting", "1": "stuck", "2": "waiting"}
        assert "sleep_in_the_middle_of_it" in started.stack("rank-1")
        assert "barrier" in started.stack("rank-0")
        (report,) = started.reports
        assert started.output.startswith((report / "table.txt").read_text().rstrip())
        assert "rank 1 is stuck in FORWARD, step 2" in started.output
        told = json.loads((tmp_path / "error-1.json").read_text())["message"]
        assert told["message"].startswith("stall guard: rank-1, stuck: in FORWARD for")
        assert "sleep_in_the_middle_of_it" in told["extraInfo"]["py_callstack"]
        assert abs(int(told["extraInfo"]["timestamp"]) - time.time()) < 60
        assert not (tmp_path / "error-0.json").exists()
        assert not (tmp_path / "beats-0").exists()


def test_a_rank_that_holds_the_gil_is_named_with_its_stack_and_ends(tmp_path: Path) -> None:
    with run(tmp_path, misdeed="hold_gil", who=1) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 2
        nothing_is_left(started)
        assert started.verdicts() == {"0": "waiting", "1": "stuck"}
        assert "hold_the_gil" in started.stack("rank-1")


def test_a_first_rank_that_is_stopped_is_named_with_its_stack_and_ends(tmp_path: Path) -> None:
    with run(tmp_path, misdeed="stop", who=0) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 2
        nothing_is_left(started)
        assert started.verdicts() == {"0": "stopped", "1": "waiting"}
        assert "misbehave" in started.stack("rank-0")


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_killed_is_named_within_ten_seconds_whichever_it_is(tmp_path: Path, who: int) -> None:
    with run(tmp_path, misdeed="kill", who=who, limits={"step_s": 100.0, "first_step_s": 100.0}) as started:
        codes = [EXIT_STALLED] * 2
        codes[who] = -signal.SIGKILL
        assert started.exit_codes(10) == codes
        nothing_is_left(started)
        assert started.verdicts() == {str(who): "dead", str(1 - who): "waiting"}
        assert f"rank {who} has died in FORWARD, step 2" in started.output


def test_the_traceback_of_a_rank_that_fails_is_printed_whole(tmp_path: Path) -> None:
    with run(tmp_path, misdeed="fail", who=1, limits={"step_s": 100.0, "first_step_s": 100.0}) as started:
        assert started.exit_codes() == [EXIT_STALLED, 1]
        nothing_is_left(started)
        assert started.verdicts() == {"0": "waiting", "1": "failed"}
        assert "Traceback (most recent call last):" in started.output
        assert "in fail_on_purpose" in started.output
        assert started.output.count("ValueError: a loss that is not a number") == 2  # in the table and below it


def test_a_loader_worker_that_is_stuck_is_named_with_its_cut_and_ends(tmp_path: Path) -> None:
    with run(tmp_path, misdeed="worker", who=1) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 2
        nothing_is_left(started)
        assert started.verdicts() == {"0": "waiting", "1": "stuck", "1.0": "stuck"}
        assert "worker 0 is stuck, at cut cut-2" in " ".join(started.output.split())
        assert "load_a_broken_cut" in started.stack("rank-1.worker-0")
        started.wait_for_end_of(started.pid("worker"))


def test_a_rank_that_skips_a_collective_is_named_and_not_the_one_that_waits_behind(tmp_path: Path) -> None:
    with run(tmp_path, misdeed="skip", who=1) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 2
        nothing_is_left(started)
        assert started.verdicts() == {"0": "waiting", "1": "stuck"}
        assert "has skipped a collective" in started.output


def test_an_ordinary_end_leaves_nothing_behind_and_says_nothing(tmp_path: Path) -> None:
    with run(tmp_path, steps=20, limits=PATIENT) as started:
        assert started.exit_codes() == [0, 0]
        nothing_is_left(started)
        assert started.output == ""
        assert not started.reports
        assert not (tmp_path / "beats-0").exists()
        assert (tmp_path / "was-alive-0").read_text() == "True"


def test_ranks_go_on_without_their_monitor_and_know_it(tmp_path: Path) -> None:
    with run(tmp_path, steps=40, limits=PATIENT) as started:
        os.kill(started.pid("monitor-0"), signal.SIGKILL)
        assert started.exit_codes() == [0, 0]
        assert (tmp_path / "was-alive-0").read_text() == "False"


@pytest.mark.slow
def test_a_monitor_that_was_suspended_with_its_ranks_raises_no_alarm(tmp_path: Path) -> None:
    with run(tmp_path, steps=60, limits={"step_s": 4.0, "first_step_s": 4.0}) as started:
        monitor = started.pid("monitor-0")
        time.sleep(0.5)
        pids = [monitor, *(rank.pid for rank in started.ranks)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert started.exit_codes() == [0, 0]
        assert not started.reports


def test_the_table_is_whole_over_two_nodes_and_both_end(tmp_path: Path) -> None:
    peers = {"host": "127.0.0.1", "port": free_port(), "run_id": "a"}
    limits = {"step_s": 4.0}  # for the monitors to meet before
    with run(tmp_path, world_size=4, nodes=2, misdeed="sleep", who=3, peers=peers, limits=limits) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 4
        for node in (0, 1):
            started.wait_for_end_of(started.pid(f"monitor-{node}"))
        # Each by its own clock: the second may be the earlier one.
        first, second = sorted(started.reports, key=lambda report: report.name.endswith("-node-1"))
        assert second.name.endswith("-node-1")
        assert (first / "table.txt").read_text() == (second / "table.txt").read_text()
        told = json.loads((first / "stall.json").read_text())
        assert {process["rank"]: process["verdict"] for process in told["processes"]} == {
            0: "waiting",
            1: "waiting",
            2: "waiting",
            3: "stuck",
        }
        assert "sleep_in_the_middle_of_it" in (first / "rank-3.stack.txt").read_text()


@pytest.mark.slow
def test_a_node_that_freezes_is_named_by_the_other(tmp_path: Path) -> None:
    port = free_port()
    peers = {"host": "127.0.0.1", "port": port}
    limits = {"step_s": 60.0, "first_step_s": 60.0, "node_silence_s": 2.0}
    with run(tmp_path, world_size=2, nodes=2, peers=peers, limits=limits) as started:
        frozen = [started.pid("monitor-1"), started.ranks[1].pid]
        wait_until(lambda: have_met(port) and (tmp_path / "barrier-20-1").exists(), PATIENCE_S)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        assert started.ranks[0].wait(PATIENCE_S) == EXIT_STALLED
        started.wait_for_end_of(started.pid("monitor-0"))
        assert "node 1 (host host-1) has not been heard from for" in started.output
        assert started.verdicts() == {"0": "waiting", "1": "silent"}


def test_a_monitor_that_hangs_up_is_a_warning_and_no_stop(tmp_path: Path) -> None:
    port = free_port()
    peers = {"host": "127.0.0.1", "port": port}
    with run(tmp_path, world_size=2, nodes=2, peers=peers, steps=100, limits=PATIENT) as started:
        monitor = started.pid("monitor-1")
        wait_until(lambda: have_met(port) and (tmp_path / "barrier-30-1").exists(), PATIENCE_S)
        os.kill(monitor, signal.SIGKILL)
        assert started.exit_codes() == [0, 0]
        assert "the monitor of node 1 (host-1) has hung up" in started.output
        assert not started.reports
