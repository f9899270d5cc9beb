"""The report on a run that is stopped: a plain-text table, all details as JSON, and the files that contain them."""

import json
import logging
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nestguard.connect.peers import StopDecision
from nestguard.diagnose.diagnosis import Diagnosis
from nestguard.diagnose.run_diagnosis import RunDiagnosis
from nestguard.diagnose.stall_limits import StallLimits
from nestguard.observe.directory import CRASH_SUFFIX, STACK_SUFFIX, TRACEBACK_SUFFIX
from nestguard.observe.process import EXIT_STALLED
from nestguard.observe.view import Phase, ProcessView

_log = logging.getLogger(__name__)
_TABLE_WIDTH = 120
_MIN_DIAGNOSIS_WIDTH = 40
_MAX_ROWS = 40
_MAX_STACK_LINES = 16


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report on a run that is stopped."""

    views: Sequence[ProcessView]
    diagnosis: RunDiagnosis
    limits: StallLimits

    def culprits(self) -> list[ProcessView]:
        """Returns the culprits, ranks before loader workers."""
        return sorted(
            (view for view, diagnosis in self._rows() if diagnosis.is_culprit),
            key=lambda view: (not view.is_rank, view.rank),
        )

    def table(self) -> str:
        """Returns the cause and a table of all ranks, culprits first. Loader workers have a row if they are culprits.

        With more than 40 rows, ranks that differ only in rank, host and age share a row.
        """
        rows = sorted(self._rows(), key=lambda row: _sort_key(*row))
        shown = [row for row in rows if row[0].is_rank or row[1].is_culprit]
        cells = [_cells(view, diagnosis) for view, diagnosis in shown]
        if len(cells) > _MAX_ROWS:
            cells = _grouped(cells)
        return f"stall guard: {self.diagnosis.cause}\n{_format(cells)}"

    def to_json(self) -> dict[str, Any]:
        """Returns the content of `stall.json`."""
        return {
            "version": 1,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "cause": self.diagnosis.cause,
            "exit_code": EXIT_STALLED,
            "limits": asdict(self.limits),
            "processes": [_process_json(view, diagnosis, self.limits) for view, diagnosis in self._rows()],
        }

    def culprit_dumps(self, dumps: Mapping[str, str]) -> list[str]:
        """Returns what is printed below the table.

        These are the tracebacks of all culprits that failed. If there are none, it is the stack of the first culprit,
        or its stack at the moment of a crash.

        Args:
            dumps: Stacks and tracebacks by file name.
        """
        tracebacks = [
            f"{view.name}:\n{dumps[f'{view.name}{TRACEBACK_SUFFIX}'].rstrip()}"
            for view in self.culprits()
            if view.reading.phase is Phase.FAILED and f"{view.name}{TRACEBACK_SUFFIX}" in dumps
        ]
        if tracebacks:
            return tracebacks
        # A loader worker's stack is more specific than its rank's, which waits for the worker.
        for view in sorted(self.culprits(), key=lambda view: view.is_rank):
            # A crash dump of faulthandler ends with a list of extension modules.
            if crash := dumps.get(f"{view.name}{CRASH_SUFFIX}", "").partition("\n\nExtension modules:")[0]:
                return [f"{view.name}, main thread when it crashed, innermost call first:\n{main_thread_stack(crash)}"]
            stacks = dumps.get(f"{view.name}{STACK_SUFFIX}")
            if stacks is not None:
                return [f"{view.name}, main thread, innermost call first:\n{main_thread_stack(stacks)}"]
        return []

    def _rows(self) -> list[tuple[ProcessView, Diagnosis]]:
        return list(zip(self.views, self.diagnosis.diagnoses, strict=True))


class _Cells(NamedTuple):
    """One row of the table."""

    rank: str
    host: str
    phase: str
    step: str
    silent: str
    diagnosis: str


_HEADER = _Cells(*_Cells._fields)


def _sort_key(view: ProcessView, diagnosis: Diagnosis) -> tuple[int, int, int]:
    worker = view.reading.identity.worker
    return int(not diagnosis.is_culprit), view.rank, -1 if worker is None else worker


def _cells(view: ProcessView, diagnosis: Diagnosis) -> _Cells:
    reading = view.reading
    identity = reading.identity
    step = "" if reading.step is None else str(reading.step)
    if step and reading.microbatch is not None and reading.phase in (Phase.LOADING, Phase.FORWARD, Phase.BACKWARD):
        step += f".{reading.microbatch}"
    has_no_heartbeat = view.is_unseen and not reading.pid
    return _Cells(
        str(identity.rank) if identity.worker is None else f"{identity.rank} worker {identity.worker}",
        identity.host,
        "" if has_no_heartbeat else reading.phase.name,
        step,
        "" if has_no_heartbeat else f"{view.age_s:.0f} s",
        diagnosis.kind + (f": {diagnosis.reason}" if diagnosis.reason else ""),
    )


def _grouped(cells: Sequence[_Cells]) -> list[_Cells]:
    """Merges rows that differ only in rank, host and age."""
    groups: dict[tuple[str, ...], list[_Cells]] = {}
    for row in cells:
        groups.setdefault((row.phase, row.step, row.diagnosis), []).append(row)
    return [
        rows[0]
        if len(rows) == 1
        else rows[0]._replace(rank=f"{rows[0].rank} and {len(rows) - 1} more", host=f"{rows[0].host} …")
        for rows in groups.values()
    ]


def _format(cells: Sequence[_Cells]) -> str:
    """Aligns the columns and wraps the diagnosis, the last column, at the width of the table."""
    rows = [_HEADER, *cells]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    indent = sum(widths) + 2 * len(widths) + 2
    lines = []
    for row in rows:
        left = "  " + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        available = max(_MIN_DIAGNOSIS_WIDTH, _TABLE_WIDTH - indent)
        wrapped = textwrap.wrap(row.diagnosis, available, break_long_words=False) or [""]
        lines.append((left + wrapped[0]).rstrip())
        lines.extend(" " * (indent + 2) + line for line in wrapped[1:])
    return "\n".join(lines)


def _process_json(view: ProcessView, diagnosis: Diagnosis, limits: StallLimits) -> dict[str, Any]:
    reading, device = view.reading, view.reading.device
    names = ("pid", "step", "microbatch", "collectives", "cuts", "waits_for", "detail")
    return {
        "name": view.name,
        **asdict(reading.identity),
        **{name: getattr(reading, name) for name in names},
        "phase": reading.phase.name,
        "device": device and {**device._asdict(), "phase": device.phase.name},
        "age_s": round(view.age_s, 3),
        "limit_s": None if reading.phase.is_final else limits.limit_of(reading),
        "state": view.state.value,
        "exit_signal": view.exit_signal,
        "diagnosis": diagnosis.kind.value,
        "reason": diagnosis.reason,
        "is_culprit": diagnosis.is_culprit,
    }


def main_thread_stack(stacks: str) -> str:
    """Returns the innermost frames of the main thread, whose stack faulthandler writes last."""
    blocks = [block for block in stacks.strip().split("\n\n") if block]
    lines = blocks[-1].splitlines() if blocks else []
    more = [f"  ... {len(lines) - _MAX_STACK_LINES} more"] if len(lines) > _MAX_STACK_LINES else []
    return "\n".join(lines[:_MAX_STACK_LINES] + more)


def write_report(parent: Path, node_rank: int, decision: StopDecision, dumps: Mapping[str, str]) -> Path:
    """Writes the report of a node to a new directory, `stall-TIME`, and returns the directory.

    Args:
        parent: Where the directory is created.
        node_rank: Part of its name, except on node 0.
        decision: The decision to end the run.
        dumps: Stacks, tracebacks and traces of the flight recorder, by file name.

    Raises:
        OSError: The report cannot be written.
    """
    suffix = f"-node-{node_rank}" if node_rank else ""
    name = f"stall-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}{suffix}"
    parent.mkdir(parents=True, exist_ok=True)
    directory = parent / name
    for number in range(2, 100):
        try:
            directory.mkdir()
            break
        except FileExistsError:  # of another run that was ended in the same second
            directory = parent / f"{name}-{number}"
    for file, text in dumps.items():
        # A dump may come from another node: only the last part of its name is used as a path.
        (directory / Path(file).name).write_text(text, encoding="utf-8")
    text = json.dumps({**decision.report, "files": sorted(dumps)}, indent=1)
    (directory / "stall.json").write_text(text, encoding="utf-8")
    (directory / "table.txt").write_text(decision.table + "\n", encoding="utf-8")
    return directory


def write_torchrun_error(view: ProcessView, decision: StopDecision, dumps: Mapping[str, str]) -> None:
    """Writes the reason to the file from which torchrun reads the error of a rank, unless the file exists."""
    path = view.reading.error_file
    if path is None or not view.is_rank or Path(path).exists():
        return
    reason = f"stall guard: {decision.reason_for(view.name)}"
    stacks = dumps.get(f"{view.name}{STACK_SUFFIX}", "")
    stack = dumps.get(f"{view.name}{TRACEBACK_SUFFIX}") or main_thread_stack(stacks)
    # torchrun takes the error with the earliest time for the root cause. It prints the stack, not the message, so
    # the stack begins with the reason.
    extra = {"py_callstack": f"{reason}\n{stack}", "timestamp": str(int(time.time() - view.age_s))}
    try:
        Path(path).write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}), encoding="utf-8")
    except OSError as error:
        _log.warning("%s: cannot write the error file for torchrun: %s", path, error)
