"""The limits of one input: CPU time, memory, and which errors may be raised."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_CPU_S = 5.0
MAX_BYTES = 500 << 20
# Far above the limit, so that what is reserved without being used counts for nothing, but ends before the machine does.
_MAX_RESERVED_BYTES = 8 << 30


class Crash(BaseException):
    """An input took too long or too much memory. No handler of `Exception` catches it."""


@dataclass
class Usage:
    """What one input took."""

    cpu_s: float = 0.0
    num_bytes: int = 0


@contextmanager
def limited() -> Iterator[Usage]:
    """Raises Crash if the block takes more CPU time or memory than one input may.

    CPU time is that of this process, so that other load does not count. Memory is the growth of the resident set at its
    highest point, which Linux measures for each process; where it cannot be measured, it counts as 0.
    """
    usage, before = Usage(), _resident()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_virtual() + _MAX_RESERVED_BYTES, hard))
    handler = signal.signal(signal.SIGPROF, _raise_crash)
    started = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        yield usage
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        usage.cpu_s = time.process_time() - started
        usage.num_bytes = _highest() - before if before else 0
    if usage.cpu_s > MAX_CPU_S:
        raise Crash(f"{usage.cpu_s:.1f} s of CPU time")
    if usage.num_bytes > MAX_BYTES:
        raise Crash(f"{usage.num_bytes >> 20} MiB of memory")


def _raise_crash(*_: Any) -> None:
    raise Crash(f"more than {MAX_CPU_S:g} s of CPU time")


def _resident() -> int:
    """Sets the highest resident set back to the present one, and returns it in bytes; 0 if that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return 0


def _highest() -> int:
    return _status("VmHWM")


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")
