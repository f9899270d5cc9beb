import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from nestguard import EXIT_STALLED
from tests.conftest import MessyCorpora
from tests.distributed.runs import END_PATIENCE_S, LIMITS, Run, gone_soon

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.faults]


def report_of(run: Run) -> dict[str, Any]:
    assert gone_soon(run)  # the monitor writes the report, possibly after the ranks have exited
    (path,) = (run.directory / "stalls").glob("*/stall.json")
    report: dict[str, Any] = json.loads(path.read_text())
    return {**report, "directory": path.parent}


def diagnoses(report: dict[str, Any]) -> dict[str, str]:
    return {process["name"]: process["diagnosis"] for process in report["processes"]}


def started(corpora: MessyCorpora, tmp_path: Path, **settings: Any) -> Run:
    return Run(
        corpora=corpora,
        directory=tmp_path / "run",
        **{"max_steps": 4, "world_size": 2, "limits": LIMITS, "patience_s": 60.0, **settings},
    )


@pytest.mark.parametrize(
    ("rank", "fault", "phase", "diagnosis", "function"),
    [
        pytest.param(1, ("sleep in loading", 1, 2), "LOADING", "stuck", "sleep_in_loading", marks=pytest.mark.smoke),
        (1, ("hold the GIL", 1, 3), "FORWARD", "stuck", "hold_the_gil"),
        (0, ("SIGSTOP", 1, 0), "FORWARD", "stopped", "Thread 0x"),
    ],
)
def test_a_rank_that_stalls_the_others_is_reported_with_its_stack(
    messy_corpora: MessyCorpora,
    tmp_path: Path,
    rank: int,
    fault: tuple[str, int, int],
    phase: str,
    diagnosis: str,
    function: str,
) -> None:
    run = started(messy_corpora, tmp_path, num_workers=2 if phase == "LOADING" else 0, max_minutes=60)
    codes = run.start(faults={rank: fault})
    log = run.log(0) + run.log(1)
    assert codes == [EXIT_STALLED] * 2, log
    assert run.seconds_from_fault_to_end() < LIMITS["step_s"] + END_PATIENCE_S
    report = report_of(run)
    name = f"rank-{rank}"
    (culprit,) = [
        process for process in report["processes"] if process["is_culprit"] and process["name"] in ("rank-0", "rank-1")
    ]
    assert (culprit["name"], culprit["diagnosis"]) == (name, diagnosis), report
    assert culprit["phase"] == phase
    if diagnosis == "stuck":
        assert diagnoses(report)[f"rank-{1 - rank}"] == "waiting"
    stacks = "".join(path.read_text() for path in report["directory"].glob(f"{name}*.stack.txt"))
    assert function in stacks
    if phase == "LOADING":
        assert any(cut in culprit["reason"] for cut in run.planned(1, 2)), culprit
    assert (report["directory"] / "table.txt").read_text().strip() in log


def test_a_rank_whose_kernel_hangs_is_reported_although_all_hosts_wait_in_the_collective(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    run = started(messy_corpora, tmp_path, has_device=True)
    codes = run.start(faults={1: ("kernel hangs in FORWARD", 1, 2)})
    assert codes == [EXIT_STALLED] * 2, run.log(0) + run.log(1)
    report = report_of(run)
    assert diagnoses(report) == {"rank-0": "waiting", "rank-1": "stuck"}
    ranks = {process["rank"]: process for process in report["processes"]}
    assert [ranks[rank]["phase"] for rank in (0, 1)] == ["COLLECTIVE", "COLLECTIVE"]
    assert ranks[1]["device"] == {"phase": "FORWARD", "step": 1, "microbatch": 0}
    assert ranks[0]["device"]["phase"] == "COLLECTIVE"
    # A stand-in runs on a CPU, so the collectives in the traces are gloo's.
    for rank in (0, 1):
        trace = json.loads((report["directory"] / f"rank-{rank}.flight-recorder.json").read_text())
        assert "pg_status" in trace


@pytest.mark.parametrize(
    ("fault", "diagnosis", "messages"),
    [
        pytest.param(("kill", 1, 2), "dead", (), marks=pytest.mark.smoke),
        (("raise", 1, 2), "failed", ("RuntimeError: an error on rank 1 only", "raise_for_one_rank")),
        (("end early", 1, 3), "failed", ("the data of rank 1 ended within step 1, after 1 of 2 microbatches",)),
    ],
)
def test_a_rank_that_ends_is_reported_immediately_and_the_others_end_too(
    messy_corpora: MessyCorpora, tmp_path: Path, fault: tuple[str, int, int], diagnosis: str, messages: tuple[str, ...]
) -> None:
    # Workers of a fork server are no children of their rank.
    num_workers = 2 if diagnosis == "dead" else 0
    run = started(messy_corpora, tmp_path, limits={**LIMITS, "step_s": 100.0}, num_workers=num_workers)
    codes = run.start(faults={1: fault})
    log = run.log(0) + run.log(1)
    # The other rank may have failed by itself because the connection was closed.
    assert codes[0] in (1, EXIT_STALLED), (codes, log)
    assert codes[1] in ((-signal.SIGKILL,) if diagnosis == "dead" else (1, EXIT_STALLED))
    assert run.seconds_from_fault_to_end() < END_PATIENCE_S
    assert diagnoses(report_of(run))["rank-1"] == diagnosis
    assert [message for message in messages if message not in log] == []
    assert gone_soon(run)


def test_a_rank_that_skips_a_collective_is_reported_although_another_rank_fails(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    run = started(messy_corpora, tmp_path)
    # Gloo aborts the process that receives an unexpected message, which is not the one that skipped the collective.
    assert 0 not in run.start(faults={1: ("skip a collective", 1, 0)})
    assert run.seconds_from_fault_to_end() < LIMITS["step_s"] + END_PATIENCE_S
    (culprit,) = [process for process in report_of(run)["processes"] if process["is_culprit"]]
    assert culprit["name"] == "rank-1"
    assert culprit["reason"].startswith("skipped a collective")
    assert gone_soon(run)


@pytest.mark.parametrize("fault", ["kill a worker", "kill a worker that fills a slot"])
def test_a_killed_loader_worker_is_reported(messy_corpora: MessyCorpora, tmp_path: Path, fault: str) -> None:
    run = started(messy_corpora, tmp_path, num_workers=2)
    codes = run.start(faults={1: (fault, 1, 2)})
    log = run.log(0) + run.log(1)
    assert codes[0] in (1, EXIT_STALLED), log
    assert run.seconds_from_fault_to_end() < END_PATIENCE_S
    culprits = {process["name"]: process for process in report_of(run)["processes"] if process["is_culprit"]}
    rank = culprits.pop("rank-1")
    if rank["diagnosis"] == "failed":
        assert not culprits
        assert re.search(r"killed by (SIGKILL|signal: Killed)", log), log  # this package, or torch
    else:
        # The rank was receiving a batch from that worker, when torch does not check whether the worker is alive.
        ((name, worker),) = culprits.items()
        assert (rank["diagnosis"], worker["diagnosis"]) == ("stuck", "dead")
        assert f"{name.replace('rank-1.worker-', 'worker ')} is dead" in rank["reason"]
    assert gone_soon(run)


def test_a_forked_worker_that_is_killed_ends_its_rank(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    # A single rank, because forks of a rank with gloo's threads may deadlock.
    run = started(messy_corpora, tmp_path, num_workers=2, start_method="fork", world_size=1)
    (code,) = run.start(faults={0: ("kill a worker", 1, 2)})
    # The guard ends a rank that was receiving a batch from that worker; see above.
    says = {1: "killed by signal: Killed", EXIT_STALLED: "is dead"}
    assert says[code] in run.log(0)
    assert run.seconds_from_fault_to_end() < END_PATIENCE_S
    assert gone_soon(run)


def test_slow_phases_with_a_longer_limit_raise_no_alarm(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    run = started(messy_corpora, tmp_path, limit_val_batches=1, max_steps=2, every_n_steps=2)
    slow = {0: ("slow checkpoint", 12, 0), 1: ("slow validation", 12, 0)}
    assert run.start(faults=slow) == [0, 0], run.log(0) + run.log(1)
    assert not (run.directory / "stalls").exists()
    assert gone_soon(run)
