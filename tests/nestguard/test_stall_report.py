import json
from pathlib import Path

import pytest

from nestguard import Phase, StallLimits
from nestguard.connect.peers import StopDecision
from nestguard.diagnose.run_diagnosis import diagnose
from nestguard.observe.view import ProcessView
from nestguard.stall_report import Report, main_thread_stack, write_report
from tests.nestguard.views import view

LIMITS = StallLimits()


def report_of(*views: ProcessView) -> Report:
    return Report(views=views, diagnosis=diagnose(views, LIMITS), limits=LIMITS)


def test_table_lists_culprits_first_and_their_workers_below_them() -> None:
    report = report_of(
        view(0, Phase.COLLECTIVE, age_s=301),
        view(0, Phase.LOADING, None, 5, worker=0),
        view(1, Phase.LOADING, age_s=302, microbatch=2),
        view(1, Phase.LOADING, None, 302, worker=0, cuts=("talk-7",)),
        view(1, Phase.LOADING, None, 302, worker=1),
    )
    assert report.table().splitlines() == [
        "stall guard: rank 1 is stuck in LOADING, step 5",
        "  rank        host    phase       step  silent  diagnosis",
        "  1           host-0  LOADING     5.2   302 s   stuck: in LOADING for 302 s (limit 300 s); "
        "worker 0 is stuck, at cut",
        "                                                  talk-7",
        "  1 worker 0  host-0  LOADING           302 s   stuck: silent for 302 s, at cut talk-7",
        "  0           host-0  COLLECTIVE  5     301 s   waiting: for rank 1",
    ]


def test_many_ranks_with_the_same_diagnosis_share_a_row() -> None:
    waiting = [view(rank, Phase.COLLECTIVE, age_s=301, world_size=1024) for rank in range(1, 1024)]
    table = report_of(view(0, age_s=301, world_size=1024), *waiting).table()
    assert len(table.splitlines()) == 4
    assert "1 and 1022 more" in table


def test_main_thread_stack_is_the_last_block_and_is_shortened() -> None:
    frames = "\n".join(f'  File "x.py", line {number} in f{number}' for number in range(30))
    other = "Thread 0x1 (most recent call first):\n  File other"
    stacks = f"{other}\n\nCurrent thread 0x2 (most recent call first):\n{frames}\n"
    shown = main_thread_stack(stacks).splitlines()
    assert shown[0].startswith("Current thread 0x2")
    assert shown[1].endswith("in f0")
    assert shown[-1] == "  ... 15 more"
    assert main_thread_stack("") == ""


def test_stack_of_a_worker_is_printed_instead_of_the_stack_of_its_rank() -> None:
    report = report_of(view(1, Phase.LOADING, age_s=302), view(1, Phase.LOADING, None, 302, worker=0, cuts=("a",)))
    stacks = {"rank-1.stack.txt": "of the rank", "rank-1.worker-0.stack.txt": "of the worker"}
    assert report.culprit_dumps(stacks) == ["rank-1.worker-0, main thread, innermost call first:\nof the worker"]
    assert report.culprit_dumps({}) == []


def test_a_dump_of_a_peer_does_not_replace_the_report(tmp_path: Path) -> None:
    decision = StopDecision({"processes": [], "cause": "a cause"}, "the table")
    directory = write_report(tmp_path, 0, decision, {"stall.json": "{}", "rank-1.stack.txt": "frames"})
    assert json.loads((directory / "stall.json").read_text())["cause"] == "a cause"
    assert (directory / "rank-1.stack.txt").read_text() == "frames"


def test_two_reports_in_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestguard.stall_report.time.strftime", lambda *_: "20261121T113227Z")
    for cause in "ab":
        write_report(tmp_path / "stalls", 0, StopDecision({"processes": [], "cause": cause}, ""), {})
    found = {path.parent.name: json.loads(path.read_text())["cause"] for path in tmp_path.glob("stalls/*/stall.json")}
    assert found == {"stall-20261121T113227Z": "a", "stall-20261121T113227Z-2": "b"}


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("gone")
    with pytest.raises(OSError, match="runs"):
        write_report(tmp_path / "runs" / "stalls", 0, StopDecision({"processes": [], "cause": "a"}, ""), {})
