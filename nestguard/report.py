"""What is said when a run is stopped: the table as plain text, and everything as JSON."""

import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from nestguard.limits import StallLimits
from nestguard.process import EXIT_STALLED
from nestguard.record import Phase
from nestguard.verdict import Diagnosis, Judgement
from nestguard.view import ProcessView

_WIDTH = 120
_MOST_ROWS = 40
_MOST_CUT = 40
_MOST_STACK_LINES = 16


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known of a run that is stopped."""

    views: Sequence[ProcessView]
    judgement: Judgement
    limits: StallLimits
    unix_s: float = field(default_factory=time.time)
    """When, by the wall clock; for people."""

    def culprits(self) -> list[ProcessView]:
        """Whom the verdict blames, ranks before their workers."""
        return sorted(
            (view for view, verdict in self._rows() if verdict.is_culprit),
            key=lambda view: (not view.is_rank, view.rank),
        )

    def table(self) -> str:
        """The table, culprits first, each rank followed by those of its workers that are to blame."""
        rows = sorted(self._rows(), key=lambda row: _order(*row))
        shown = [row for row in rows if row[0].is_rank or row[1].is_culprit]
        cells = [_cells(view, verdict) for view, verdict in shown]
        if len(cells) > _MOST_ROWS:
            cells = _grouped(cells)
        return f"stall guard: {self.judgement.cause}\n{_draw(cells)}"

    def to_json(self) -> dict[str, Any]:
        """All there is."""
        return {
            "version": 1,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.unix_s)),
            "cause": self.judgement.cause,
            "exit_code": EXIT_STALLED,
            "limits": asdict(self.limits),
            "processes": [_process_json(view, verdict, self.limits) for view, verdict in self._rows()],
        }

    def told(self, texts: Mapping[str, str]) -> list[str]:
        """What stands below the table: tracebacks of whoever is to blame and failed, else where the first stands.

        Args:
            texts: Stacks and tracebacks by the names of their files.
        """
        tracebacks = [
            f"{view.name}:\n{texts[f'{view.name}.traceback.txt'].rstrip()}"
            for view in self.culprits()
            if view.reading.phase is Phase.FAILED and f"{view.name}.traceback.txt" in texts
        ]
        if tracebacks:
            return tracebacks
        # A worker that is to blame says more than its rank, which waits for it.
        for view in sorted(self.culprits(), key=lambda view: view.is_rank):
            if f"{view.name}.stack.txt" in texts:
                return [f"{view.name}, main thread, innermost first:\n{last_stack(texts[f'{view.name}.stack.txt'])}"]
        return []

    def _rows(self) -> list[tuple[ProcessView, Diagnosis]]:
        return list(zip(self.views, self.judgement.verdicts, strict=True))


def last_stack(stacks: str) -> str:
    """The stack of the main thread, from what faulthandler wrote of all: the last of them, its innermost frames."""
    blocks = [block for block in stacks.strip().split("\n\n") if block]
    lines = blocks[-1].splitlines() if blocks else []
    more = [f"  ... {len(lines) - _MOST_STACK_LINES} more"] if len(lines) > _MOST_STACK_LINES else []
    return "\n".join(lines[:_MOST_STACK_LINES] + more)


def torchrun_error(message: str, stack: str, unix_s: float) -> Mapping[str, Any]:
    """What torchrun reads from the error file of a rank."""
    return {
        "message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": str(int(unix_s))}},
    }


class _Cells(NamedTuple):
    rank: str
    host: str
    phase: str
    step: str
    age: str
    verdict: str


_TITLES = _Cells("rank", "host", "phase", "step", "silent", "verdict")


def _order(view: ProcessView, verdict: Diagnosis) -> tuple[int, int, int]:
    worker = view.reading.identity.worker
    return int(not verdict.is_culprit), view.rank, -1 if worker is None else worker


def _cells(view: ProcessView, verdict: Diagnosis) -> _Cells:
    reading = view.reading
    identity = reading.identity
    step = "" if reading.step is None else str(reading.step)
    if step and reading.microbatch is not None and reading.phase in (Phase.LOADING, Phase.FORWARD, Phase.BACKWARD):
        step += f".{reading.microbatch}"
    is_unknown = view.is_unseen and not reading.pid
    reason = verdict.reason
    for cut in reading.cuts[:1]:
        reason = reason.replace(cut, _cut_short(cut))
    return _Cells(
        str(identity.rank) if identity.worker is None else f"{identity.rank} worker {identity.worker}",
        identity.host,
        "" if is_unknown else reading.phase.name,
        step,
        "" if is_unknown else f"{view.age_s:.0f} s",
        verdict.word + (f": {reason}" if reason else ""),
    )


def _cut_short(cut: str) -> str:
    """The ends of a long cut id: what tells it from others may be at either."""
    half = _MOST_CUT // 2
    return cut if len(cut) <= _MOST_CUT else f"{cut[:half]}…{cut[1 - half :]}"


def _grouped(cells: Sequence[_Cells]) -> list[_Cells]:
    """Rows that say the same, but for rank, host and age, become one."""
    groups: dict[tuple[str, ...], list[_Cells]] = {}
    for row in cells:
        groups.setdefault((row.phase, row.step, row.verdict), []).append(row)
    return [
        rows[0]
        if len(rows) == 1
        else rows[0]._replace(rank=f"{rows[0].rank} and {len(rows) - 1} more", host=f"{rows[0].host} …")
        for rows in groups.values()
    ]


def _draw(cells: Sequence[_Cells]) -> str:
    rows = [_TITLES, *cells]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES) - 1)]
    indent = sum(widths) + 2 * len(widths) + 2
    lines = []
    for row in rows:
        left = "  " + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        wrapped = textwrap.wrap(row.verdict, max(40, _WIDTH - indent), break_long_words=False) or [""]
        lines.append((left + wrapped[0]).rstrip())
        lines.extend(" " * (indent + 2) + line for line in wrapped[1:])
    return "\n".join(lines)


def _process_json(view: ProcessView, verdict: Diagnosis, limits: StallLimits) -> dict[str, Any]:
    reading = view.reading
    limit = limits.limit_of(reading)
    return {
        "name": view.name,
        **asdict(reading.identity),
        "pid": reading.pid,
        "phase": reading.phase.name,
        "step": reading.step,
        "microbatch": reading.microbatch,
        "collectives": reading.collectives,
        "age_s": round(view.age_s, 3),
        "limit_s": None if reading.phase.is_final else limit,
        "state": view.state.value,
        "cuts": list(reading.cuts),
        "detail": reading.detail,
        "verdict": verdict.word.value,
        "reason": verdict.reason,
        "is_culprit": verdict.is_culprit,
    }
