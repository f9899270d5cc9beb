"""The end of a run that is stopped, on one node: the stacks of all processes, then their end."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from nestguard.process import END_SIGNAL, STACK_SIGNAL, ProcessState, process_state, send
from nestguard.view import ProcessView

_STACKS_S = 2.0
_END_S = 3.0
_POLL_S = 0.05
_MOST_BYTES = 1 << 20


def take_stacks(directory: Path, views: Sequence[ProcessView]) -> None:
    """Has every process that is armed write its stacks; a stopped one is continued for it.

    Waits until the files grow no more, two seconds at most.
    """
    asked = [view for view in views if view.reading.is_armed and not _has_ended(view)]
    for view in asked:
        send(view.reading.pid, view.reading.start_ticks, STACK_SIGNAL)
    _continue(asked)
    deadline = time.monotonic() + _STACKS_S
    sizes: list[int] = []
    while asked and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        before, sizes = sizes, [_size(_path(directory, view, "stack")) for view in asked]
        if sizes == before and all(sizes):
            return


def texts(directory: Path, views: Sequence[ProcessView]) -> dict[str, str]:
    """Returns what processes have left, by file name: stacks and tracebacks."""
    found = {}
    for view in views:
        for kind in ("stack", "traceback"):
            path = _path(directory, view, kind)
            try:
                with path.open("rb") as file:
                    text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
            except OSError:
                continue
            if text:
                found[path.name] = text
    return found


def end_processes(views: Sequence[ProcessView]) -> list[ProcessView]:
    """Ends all processes: exit code 44 for those that are armed, SIGKILL after three seconds for whoever remains.

    Returns those that even that does not end, as they are in the kernel.
    """
    # Whoever is to blame first: torchrun takes the first that ends for the cause.
    for view in views:
        send(view.reading.pid, view.reading.start_ticks, END_SIGNAL)
    _continue(views)
    _wait_for(views)
    for view in views:
        send(view.reading.pid, view.reading.start_ticks, signal.SIGKILL)
    return _wait_for(views, 1.0)


def _wait_for(views: Sequence[ProcessView], seconds: float = _END_S) -> list[ProcessView]:
    deadline = time.monotonic() + seconds
    while (left := [view for view in views if not _has_ended(view)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def _continue(views: Sequence[ProcessView]) -> None:
    for view in views:
        if view.state is ProcessState.STOPPED:
            send(view.reading.pid, view.reading.start_ticks, signal.SIGCONT)


def _has_ended(view: ProcessView) -> bool:
    return view.reading.pid <= 0 or process_state(view.reading.pid, view.reading.start_ticks).has_ended


def _path(directory: Path, view: ProcessView, kind: str) -> Path:
    return directory / f"{view.name}.{kind}.txt"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
