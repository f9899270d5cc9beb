"""Ends the processes of one node: first they write their stacks, then they are terminated."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from nestguard.process import END_SIGNAL, STACK_SIGNAL, ProcessState, process_state, send_signal
from nestguard.view import ProcessView

_DUMP_S = 2.0
_EXIT_S = 3.0
_KILL_S = 1.0
_POLL_S = 0.05
_MAX_DUMP_BYTES = 1 << 20


def request_stacks(directory: Path, views: Sequence[ProcessView]) -> None:
    """Makes every armed process write its stacks; a stopped process is continued so that it can.

    Waits until the stack files no longer grow, for at most two seconds.
    """
    armed = [view for view in views if view.reading.is_armed and not _has_ended(view)]
    for view in armed:
        send_signal(view.reading.pid, view.reading.start_ticks, STACK_SIGNAL)
    _continue_stopped(armed)
    deadline = time.monotonic() + _DUMP_S
    sizes: list[int] = []
    while armed and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        before, sizes = sizes, [_size(_path(directory, view, "stack")) for view in armed]
        if sizes == before and all(sizes):
            return


def read_dumps(directory: Path, views: Sequence[ProcessView]) -> dict[str, str]:
    """Returns the stacks and tracebacks that processes have written, by file name."""
    dumps = {}
    for view in views:
        for kind in ("stack", "traceback"):
            path = _path(directory, view, kind)
            try:
                with path.open("rb") as file:
                    text = file.read(_MAX_DUMP_BYTES).decode("utf-8", errors="replace")
            except OSError:
                continue
            if text:
                dumps[path.name] = text
    return dumps


def terminate(views: Sequence[ProcessView]) -> list[ProcessView]:
    """Ends processes in the given order: exit code 44 for armed ones, SIGKILL after three seconds for the others.

    Returns:
        Those that survive SIGKILL because they are in an uninterruptible system call.
    """
    # Callers put culprits first: torchrun reports the process that ends first as the root cause.
    for view in views:
        send_signal(view.reading.pid, view.reading.start_ticks, END_SIGNAL)
    _continue_stopped(views)
    _wait_for_exit(views, _EXIT_S)
    for view in views:
        send_signal(view.reading.pid, view.reading.start_ticks, signal.SIGKILL)
    return _wait_for_exit(views, _KILL_S)


def _wait_for_exit(views: Sequence[ProcessView], timeout_s: float) -> list[ProcessView]:
    """Returns the processes that still run after at most `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while (left := [view for view in views if not _has_ended(view)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def _continue_stopped(views: Sequence[ProcessView]) -> None:
    for view in views:
        if view.state is ProcessState.STOPPED:
            send_signal(view.reading.pid, view.reading.start_ticks, signal.SIGCONT)


def _has_ended(view: ProcessView) -> bool:
    return view.reading.pid <= 0 or process_state(view.reading.pid, view.reading.start_ticks).has_ended


def _path(directory: Path, view: ProcessView, kind: str) -> Path:
    return directory / f"{view.name}.{kind}.txt"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
