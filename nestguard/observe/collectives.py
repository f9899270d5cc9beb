"""What the flight recorder of torch.distributed tells about the collectives of a stalled run.

The recorder lists the collectives that a rank has scheduled, and how far they have come. Before the monitor ends the
ranks, it asks for a summary: it creates a file, and the thread of each rank that observes the device answers it. The
trace is read as JSON. torch's default format is a pickle, which would have to be trusted.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nestguard.observe.directory import COLLECTIVES_REQUEST, COLLECTIVES_SUFFIX, PARTIAL_SUFFIX, create_file
from nestguard.observe.errors import INVALID_VALUE_ERRORS
from nestguard.observe.view import ranks_text

TraceReader = Callable[[], str]
"""Returns the trace of the flight recorder in torch's JSON format; an empty text without a recorder."""


@dataclass(frozen=True, kw_only=True)
class GroupProgress:
    """How far a rank has come in the collectives of one process group. Collectives are numbered from 1."""

    group: str
    scheduled: int
    """Number of the last collective that the process has scheduled."""

    started: int | None
    """Number of the last one that the device has started; None if the recorder does not note this."""

    completed: int
    next_name: str = ""
    """Name of the first collective that is not completed, for example `nccl:all_reduce`; empty without one."""


class Trace:
    """Answers the monitor's request for the collectives of this process.

    Args:
        directory: Where the processes of this node write their heartbeats.
        name: Base name of the files of this process.
        read: Returns the trace; None if there is none, so that the request is not answered.
    """

    def __init__(self, directory: Path, name: str, read: TraceReader | None) -> None:
        self._request = directory / COLLECTIVES_REQUEST
        self._answer = directory / (name + COLLECTIVES_SUFFIX)
        self._read = read

    def serve(self) -> None:
        """Writes the summary once, when the monitor has asked for it."""
        if self._read is None or not self._request.exists():
            return
        read, self._read = self._read, None
        try:
            groups = parse_trace(read())
        except (RuntimeError, *INVALID_VALUE_ERRORS):
            groups = []
        partial = self._answer.with_name(f".{self._answer.name}{PARTIAL_SUFFIX}")
        with contextlib.suppress(OSError):
            with create_file(partial) as file:
                file.write(json.dumps([asdict(group) for group in groups]).encode())
            partial.rename(self._answer)


def parse_trace(text: str) -> list[GroupProgress]:
    """Summarises a trace of torch's flight recorder (format 2) by process group, in the order of their names.

    Raises ValueError, TypeError, LookupError or AttributeError if the text is not such a trace.

    Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp of PyTorch 2.11, `dump_json`.
    """
    if not text:
        return []
    trace = json.loads(text)
    entries: dict[str, list[Mapping[str, Any]]] = {}
    for entry in trace.get("entries", ()):
        if not entry["is_p2p"]:
            entries.setdefault(str(entry["pg_id"]), []).append(entry)
    groups: dict[str, GroupProgress] = {}
    for group_id, status in trace["pg_status"].items():
        progress = _progress(entries.get(group_id, []), status, group_id)
        # Groups may have the same name; their numbers are the same on all ranks.
        name = progress.group if progress.group not in groups else f"{progress.group} ({group_id})"
        groups[name] = replace(progress, group=name)
    return sorted(groups.values(), key=lambda group: group.group)


def _progress(entries: Sequence[Mapping[str, Any]], status: Mapping[str, Any], group_id: str) -> GroupProgress:
    # The status is updated by torch's watchdog; the entries are asked for the state of their events.
    by_state: dict[str, int] = {}
    for entry in entries:
        by_state[entry["state"]] = max(by_state.get(entry["state"], 0), int(entry["collective_seq_id"]))
    completed = max(int(status["last_completed_collective"]), by_state.get("completed", 0), 0)
    started = max(int(status["last_started_collective"]), by_state.get("started", 0))
    waiting = [entry for entry in entries if int(entry["collective_seq_id"]) > completed]
    first = min(waiting, key=lambda entry: int(entry["collective_seq_id"]), default=None)
    return GroupProgress(
        group=next((str(name) for entry in entries for name in reversed(entry["process_group"]) if name), group_id),
        scheduled=max(0, int(status["last_enqueued_collective"]), *by_state.values()),
        # Without TORCH_NCCL_ENABLE_TIMING, and with gloo, the number of the last started collective stays at -1.
        started=max(started, completed) if started > 0 else None,
        completed=completed,
        next_name="" if first is None else str(first["profiling_name"]),
    )


def read_summaries(dumps: Mapping[str, str]) -> dict[int, list[GroupProgress]]:
    """Returns the summaries among the dumps of the ranks, by rank. Invalid ones are left out.

    Args:
        dumps: Content of the files that ranks have written, by file name.
    """
    found = {}
    for name, text in dumps.items():
        if name.endswith(COLLECTIVES_SUFFIX):
            with contextlib.suppress(*INVALID_VALUE_ERRORS):
                rank = int(name.removeprefix("rank-").removesuffix(COLLECTIVES_SUFFIX))
                found[rank] = [_checked(group) for group in json.loads(text)]
    return dict(sorted(found.items()))


def _checked(fields: Mapping[str, Any]) -> GroupProgress:
    """Returns a summary that came from a file or another node; raises TypeError or ValueError if it is invalid."""
    started = fields["started"]
    return GroupProgress(
        group=str(fields["group"])[:80],
        scheduled=int(fields["scheduled"]),
        started=None if started is None else int(started),
        completed=int(fields["completed"]),
        next_name=str(fields["next_name"])[:80],
    )


def describe(summaries: Mapping[int, Sequence[GroupProgress]]) -> list[str]:
    """Returns the lines of the report about collectives: for each process group a conclusion, and all ranks."""
    by_group: dict[str, dict[int, GroupProgress]] = {}
    for rank, groups in summaries.items():
        for group in groups:
            by_group.setdefault(group.group, {})[rank] = group
    return [line for name in sorted(by_group) for line in _lines(name, by_group[name])]


def _lines(name: str, ranks: Mapping[int, GroupProgress]) -> list[str]:
    lines = [f"collectives of {name}, from the flight recorder:" + _conclusion(ranks)]
    alike: dict[GroupProgress, list[int]] = {}
    for rank, progress in ranks.items():
        alike.setdefault(progress, []).append(rank)
    for progress, members in alike.items():
        started = "" if progress.started is None else f", started {progress.started}"
        following = f"; not completed: {progress.next_name}" if progress.next_name else ""
        lines.append(
            f"  {ranks_text(members)}: scheduled {progress.scheduled}{started}, completed {progress.completed}"
            + following
        )
    return lines


def _conclusion(ranks: Mapping[int, GroupProgress]) -> str:
    """Names the ranks that hold up the first collective that some rank has not completed; empty if none stand out."""
    number = min(progress.completed for progress in ranks.values()) + 1
    absent = [rank for rank, progress in ranks.items() if progress.scheduled < number]
    if absent and len(absent) < len(ranks):
        return f" number {number} is not scheduled by {ranks_text(absent)}"
    late = [rank for rank, progress in ranks.items() if progress.started is not None and progress.started < number]
    if late and len(late) < len(ranks):
        return f" number {number} is scheduled but not started by {ranks_text(late)}"
    unfinished = [rank for rank, progress in ranks.items() if progress.completed < number]
    if len(unfinished) < len(ranks):
        return f" number {number} is not completed by {ranks_text(unfinished)} only"
    return ""
