"""Ends the processes of one node: first they write their stacks, then they are terminated."""

import contextlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from nestguard.observe.directory import (
    CRASH_SUFFIX,
    STACK_SUFFIX,
    TRACE_SUFFIX,
    TRACEBACK_SUFFIX,
    TRACES_REQUEST,
    create_file,
    open_file,
)
from nestguard.observe.process import END_SIGNAL, process_state, send_signal
from nestguard.observe.stacks import ask_for_stacks, interrupt_for_stacks
from nestguard.observe.view import ProcessState, ProcessView

_ASK_S = 1.0
_DUMP_S = 2.0
_EXIT_S = 3.0
_KILL_S = 1.0
_POLL_S = 0.05
_MAX_DUMP_BYTES = 1 << 20
DUMP_SUFFIXES = (STACK_SUFFIX, CRASH_SUFFIX, TRACEBACK_SUFFIX, TRACE_SUFFIX)
"""Ends of the names of the files that a process writes before it ends."""


def collect_dumps(directory: Path, views: Sequence[ProcessView]) -> dict[str, str]:
    """Makes processes write their stacks and traces; returns these and tracebacks, by file name."""
    _request_dumps(directory, views)
    return _read_dumps(directory, views)


def _request_dumps(directory: Path, views: Sequence[ProcessView]) -> None:
    """Makes every armed process write its stacks, and every rank with a device the trace of its flight recorder.

    A stopped process is continued so that it can. A process that writes nothing within a second is interrupted. Waits
    until the stack files no longer grow and the traces exist, for at most two seconds.
    """
    with contextlib.suppress(OSError):
        create_file(directory / TRACES_REQUEST).close()
    traces = [
        directory / f"{view.name}{TRACE_SUFFIX}" for view in views if view.reading.device and not _has_ended(view)
    ]
    armed = [view for view in views if view.reading.is_armed and not _has_ended(view)]
    for view in armed:
        ask_for_stacks(directory, view.name)
    _continue_stopped(armed)
    stacks = [directory / f"{view.name}{STACK_SUFFIX}" for view in armed]
    if not _are_written(stacks, traces, _ASK_S):
        for view, path in zip(armed, stacks, strict=True):
            if _size(path) == 0:
                interrupt_for_stacks(view.reading.pid, view.reading.start_ticks)
        _are_written(stacks, traces, _DUMP_S - _ASK_S)


def _read_dumps(directory: Path, views: Sequence[ProcessView]) -> dict[str, str]:
    dumps = {}
    for view in views:
        for suffix in DUMP_SUFFIXES:
            path = directory / f"{view.name}{suffix}"
            with contextlib.suppress(OSError), open_file(path) as file:
                if text := file.read(_MAX_DUMP_BYTES).decode("utf-8", errors="replace"):
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


def _are_written(stacks: Sequence[Path], traces: Sequence[Path], timeout_s: float) -> bool:
    """Waits until no stack file is empty or grows and all traces exist; returns whether this was in time."""
    deadline = time.monotonic() + timeout_s
    sizes: list[int] = []
    while stacks and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        before, sizes = sizes, [_size(path) for path in stacks]
        if sizes == before and all(sizes) and all(trace.exists() for trace in traces):
            return True
    return not stacks


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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
