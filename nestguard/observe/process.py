"""The state of a process in /proc, and signals to it. Linux only."""

import contextlib
import os
import signal
import time
from pathlib import Path

from nestguard.observe.view import ProcessState

EXIT_STALLED = 44
"""Exit code of every rank that the stall guard terminates."""

END_SIGNAL = 44
"""Terminates an armed process, whatever it is executing, with the signal's own number as the exit code."""

STACK_SIGNAL = 43
"""Makes an armed process write the Python stacks of all its threads."""

# `_exit` itself is installed as the C handler of END_SIGNAL, because a stuck rank may hold the GIL, so that no Python
# code can end it. A handler receives the number of its signal as its argument, so that number becomes the exit code, by
# which a launcher tells this exit from others. Signals 43 and 44 cannot be used for anything else.
assert END_SIGNAL == EXIT_STALLED
if hasattr(signal, "SIGRTMIN"):
    assert signal.SIGRTMIN < STACK_SIGNAL < END_SIGNAL < signal.SIGRTMAX


_STATES = {
    "R": ProcessState.RUNNING,
    "D": ProcessState.BLOCKED,
    "T": ProcessState.STOPPED,
    "t": ProcessState.STOPPED,
    "Z": ProcessState.ZOMBIE,
    "X": ProcessState.GONE,
    "x": ProcessState.GONE,
}


def start_ticks(pid: int) -> int | None:
    """Returns the start time of a process in clock ticks since boot, or None if there is no such process.

    A pid can be reused. The pair of pid and start time identifies one process.
    """
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def process_state(pid: int, started: int) -> ProcessState:
    """Returns the state of the process with this pid and this start time in clock ticks."""
    stat = _stat(pid)
    if stat is None or int(stat[19]) != started:
        return ProcessState.GONE
    return _STATES.get(stat[0], ProcessState.SLEEPING)


def exit_signal(pid: int, started: int) -> int | None:
    """Returns the signal that ended a process; None if it still runs, exited by itself, or its parent has reaped it."""
    stat = _stat(pid)
    if stat is None or int(stat[19]) != started or not _STATES.get(stat[0], ProcessState.SLEEPING).has_ended:
        return None
    # Field 52, the status as `waitpid` reports it; 0 if this process may not read it.
    return int(stat[49]) & 0x7F or None


def started_ns(pid: int) -> int | None:
    """Returns the start time of a process in ns of CLOCK_MONOTONIC, or None if there is no such process."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.monotonic_ns() - age_ns


def send_signal(pid: int, started: int, number: int) -> None:
    """Sends a signal to the process with this pid and start time; does nothing if it has ended."""
    if pid > 0 and not process_state(pid, started).has_ended:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the third on.

    The second field is the program's name in brackets. It may itself contain spaces and brackets.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def describe_exit(code: int) -> str:
    """Describes the exit code of a `Popen` or a `Process` that failed, which is negative after a signal."""
    return f"exited with code {code}" if code > 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as `SIGKILL`, or `signal 44` for one without a name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
