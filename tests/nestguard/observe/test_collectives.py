"""The traces in `traces/` follow `dump_json` in FlightRecorderDetail.hpp of PyTorch 2.11, with NCCL and timing on."""

import json
from pathlib import Path
from typing import Any

import pytest

from nestguard.observe.collectives import GroupProgress, Trace, describe, parse_trace, read_summaries
from nestguard.observe.directory import COLLECTIVES_REQUEST

TRACES = Path(__file__).parents[1] / "traces"
HUNG, WAITING = ((TRACES / f"{name}.json").read_text() for name in ("nccl_hung_kernel", "nccl_waiting"))


def group(scheduled: int, started: int | None, completed: int, name: str = "nccl:all_reduce") -> GroupProgress:
    return GroupProgress(group="default_pg", scheduled=scheduled, started=started, completed=completed, next_name=name)


def untimed(text: str) -> str:
    """Returns a trace as it is without TORCH_NCCL_ENABLE_TIMING: no start is noted."""
    trace: dict[str, Any] = json.loads(text)
    trace["pg_status"]["0"]["last_started_collective"] = "-1"
    for entry in trace["entries"]:
        entry["state"] = "scheduled"
    return json.dumps(trace)


def test_a_trace_is_summarised_by_process_group_without_point_to_point_messages() -> None:
    assert parse_trace(HUNG) == [group(32, 30, 30)]
    assert parse_trace(WAITING) == [group(32, 31, 30)]


def test_a_state_that_the_watchdog_has_not_seen_yet_counts() -> None:
    trace = json.loads(WAITING)
    trace["entries"][0]["state"] = "completed"
    assert parse_trace(json.dumps(trace)) == [group(32, 31, 31)]


def test_starts_are_unknown_without_timing() -> None:
    assert parse_trace(untimed(WAITING)) == [group(32, None, 30)]


def test_a_collective_that_is_scheduled_but_not_started_names_the_rank() -> None:
    assert describe({0: parse_trace(WAITING), 1: parse_trace(HUNG), 2: parse_trace(WAITING)}) == [
        "collectives of default_pg, from the flight recorder: number 31 is scheduled but not started by rank 1",
        "  ranks 0, 2: scheduled 32, started 31, completed 30; not completed: nccl:all_reduce",
        "  rank 1: scheduled 32, started 30, completed 30; not completed: nccl:all_reduce",
    ]


def test_a_collective_that_is_not_scheduled_names_the_rank() -> None:
    lines = describe({0: [group(32, None, 30)], 1: [group(30, None, 30, "")]})
    assert lines == [
        "collectives of default_pg, from the flight recorder: number 31 is not scheduled by rank 1",
        "  rank 0: scheduled 32, completed 30; not completed: nccl:all_reduce",
        "  rank 1: scheduled 30, completed 30",
    ]


def test_a_collective_that_only_one_rank_has_not_completed_names_it() -> None:
    (line, *_) = describe({0: [group(32, 32, 32, "")], 1: [group(32, 31, 30)]})
    assert line.endswith(" number 31 is not completed by rank 1 only")


def test_ranks_that_are_equally_far_are_listed_without_a_conclusion() -> None:
    both = parse_trace(untimed(WAITING))
    assert describe({0: both, 1: both}) == [
        "collectives of default_pg, from the flight recorder:",
        "  ranks 0-1: scheduled 32, completed 30; not completed: nccl:all_reduce",
    ]


def test_the_summary_is_written_once_when_it_is_wanted(tmp_path: Path) -> None:
    read: list[str] = []
    trace = Trace(tmp_path, "rank-1", lambda: read.append(HUNG) or HUNG)  # type: ignore[func-returns-value]
    trace.serve()
    assert not read
    (tmp_path / COLLECTIVES_REQUEST).touch()
    trace.serve()
    trace.serve()
    assert read == [HUNG]
    name = "rank-1.collectives.json"
    assert read_summaries({name: (tmp_path / name).read_text(), "rank-1.stack.txt": "..."}) == {1: parse_trace(HUNG)}
    assert {path.name for path in tmp_path.iterdir()} == {COLLECTIVES_REQUEST, name}


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"pg_status": {"0": {}}}'])
def test_an_invalid_trace_yields_an_empty_summary(tmp_path: Path, text: str) -> None:
    (tmp_path / COLLECTIVES_REQUEST).touch()
    Trace(tmp_path, "rank-1", lambda: text).serve()
    assert (tmp_path / "rank-1.collectives.json").read_text() == "[]"


@pytest.mark.parametrize("text", ["no JSON", "1", '[{"group": "a"}]'])
def test_an_invalid_summary_of_a_rank_is_left_out(text: str) -> None:
    valid = json.dumps([{"group": "default_pg", "scheduled": 2, "started": None, "completed": 1, "next_name": "a"}])
    dumps = {"rank-0.collectives.json": valid, "rank-1.collectives.json": text}
    assert read_summaries(dumps) == {0: [group(2, None, 1, "a")]}
