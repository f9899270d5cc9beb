"""What the operating system says of a process, from /proc. Linux only."""

import contextlib
import os
import signal
import time
from enum import StrEnum
from pathlib import Path

EXIT_STALLED = 44
"""Exit code of every rank that the guard has ended."""

END_SIGNAL = 44
"""Ends a process that is armed, whatever it does, with its own number as the exit code."""

STACK_SIGNAL = 43
"""Has a process that is armed write the Python stacks of all its threads."""

# A handler is called with the number of its signal: `_exit` as the handler makes it the exit code.
assert END_SIGNAL == EXIT_STALLED
if hasattr(signal, "SIGRTMIN"):
    assert signal.SIGRTMIN < STACK_SIGNAL < END_SIGNAL < signal.SIGRTMAX


class ProcessState(StrEnum):
    """What the operating system says of a process."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    BLOCKED = "blocked"
    """In the kernel, where no signal reaches it: nearly always a disk or a network file system."""

    STOPPED = "stopped"
    """By SIGSTOP, by the terminal, or by a debugger."""

    ZOMBIE = "zombie"
    GONE = "gone"
    NOT_STARTED = "not started"
    """It is expected and has not been seen."""

    UNSEEN = "unseen"
    """Its node is out of touch, which tells nothing of it."""

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
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


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did: with the pid, it names one process for good.

    None where there is no such process.
    """
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def process_state(pid: int, started: int) -> ProcessState:
    """Returns the state of the process that had this pid and started at this tick."""
    stat = _stat(pid)
    if stat is None or int(stat[19]) != started:
        return ProcessState.GONE
    return _STATES.get(stat[0], ProcessState.SLEEPING)


def started_ns(pid: int) -> int | None:
    """When a process started, as CLOCK_MONOTONIC has it."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.monotonic_ns() - age_ns


def send(pid: int, started: int, number: int) -> None:
    """Sends a signal to this very process, and none where it is gone."""
    if pid > 0 and not process_state(pid, started).has_ended:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on: the second is the program's name, with spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
