"""State of a process according to /proc, and sending signals to it. Linux only."""

import contextlib
import os
import signal
import time
from enum import StrEnum
from pathlib import Path

EXIT_STALLED = 44
"""Exit code of every rank that the stall guard terminates."""

END_SIGNAL = 44
"""Terminates an armed process, whatever it is executing, with the signal's own number as the exit code."""

STACK_SIGNAL = 43
"""Makes an armed process write the Python stacks of all its threads."""

CRASH_SUFFIX = ".crash.txt"
"""End of the name of the file to which an armed process writes its stacks when it crashes."""

# `_exit` itself is installed as the C handler of END_SIGNAL. A handler receives the number of its signal as its
# argument, so that number becomes the exit code.
assert END_SIGNAL == EXIT_STALLED
if hasattr(signal, "SIGRTMIN"):
    assert signal.SIGRTMIN < STACK_SIGNAL < END_SIGNAL < signal.SIGRTMAX


class ProcessState(StrEnum):
    """State of a process: what the operating system reports, or why nothing is known about it."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    BLOCKED = "blocked"
    """In an uninterruptible system call, which no signal interrupts: nearly always a disk or a network file system."""

    STOPPED = "stopped"
    """Stopped by SIGSTOP, by the terminal, or by a debugger."""

    ZOMBIE = "zombie"
    GONE = "gone"
    NOT_STARTED = "not started"
    """The process is expected, but it has not written a heartbeat."""

    UNSEEN = "unseen"
    """There is no contact with the node of the process, so its state is unknown."""

    @property
    def has_ended(self) -> bool:
        """Whether the process no longer runs."""
        return self in (ProcessState.ZOMBIE, ProcessState.GONE)


_STATES = {
    "R": ProcessState.RUNNING,
    "D": ProcessState.BLOCKED,
    "T": ProcessState.STOPPED,
    "t": ProcessState.STOPPED,
    "Z": ProcessState.ZOMBIE,
    "X": ProcessState.GONE,
    "x": ProcessState.GONE,
}


_FATAL = {
    "Aborted": int(signal.SIGABRT),
    "Bus error": int(signal.SIGBUS),
    "Floating-point exception": int(signal.SIGFPE),
    "Floating point exception": int(signal.SIGFPE),
    "Illegal instruction": int(signal.SIGILL),
    "Segmentation fault": int(signal.SIGSEGV),
}
"""First lines of the crash dumps that faulthandler writes, as it spells them in different versions of Python."""


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


def crash_signal(line: str) -> int | None:
    """Returns the signal whose name begins a crash dump of Python's faulthandler; None for any other line."""
    text = line.strip().removeprefix("Fatal Python error: ")
    return next((number for name, number in _FATAL.items() if text == name), None)


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
