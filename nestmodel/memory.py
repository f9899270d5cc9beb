"""Memory of this machine that is free, as the system tells."""

import math
from contextlib import suppress
from pathlib import Path


def available_bytes() -> int:
    """Returns the memory that new allocations may use without swapping, in bytes; 0 if unknown.

    A container or job may have less than its machine: the limits of its control groups (version 2) count.
    """
    available = 1024 * read_kib("/proc/meminfo", "MemAvailable")
    return int(min(available, max(1, _left_in_groups())))  # 0 would mean unknown, so 1 stands for a full group


def read_kib(path: str, name: str) -> int:
    """Returns a value in KiB from a file in Linux's /proc; 0 on other systems."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _left_in_groups() -> float:
    """Returns the smallest memory that the control groups of this process have left; infinite without a limit."""
    try:
        name = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
    except OSError:
        return math.inf
    group, left = Path("/sys/fs/cgroup", name.lstrip("/")), math.inf
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):  # "max", or the root
            limit, used = (int((folder / f"memory.{file}").read_text()) for file in ("max", "current"))
            cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())["inactive_file"]
            left = min(left, max(0, limit - used + int(cached)))
    return left
