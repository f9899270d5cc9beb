"""CPU time of processes, as Linux counts it in /proc, and their restriction to one core."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def seconds(pids: Iterable[int]) -> float:
    """Returns the CPU time of all threads of processes, of those that have ended, too; in the kernel or not."""
    return sum(_seconds(Path(f"/proc/{pid}/stat")) for pid in pids)


def seconds_of_main_threads(pids: Iterable[int]) -> float:
    """Returns the CPU time of the main threads of processes."""
    return sum(_seconds(Path(f"/proc/{pid}/task/{pid}/stat")) for pid in pids)


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have started."""
    children = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children[int(_fields(path)[1])].append(int(path.parent.name))
    found = list(children[pid])
    for child in found:
        found += children[child]
    return found


@contextmanager
def on_core(core: int, pids: Iterable[int]) -> Iterator[None]:
    """Restricts all threads of processes to one core during the block."""
    threads = [int(path.name) for pid in pids for path in Path(f"/proc/{pid}/task").iterdir()]
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    _restrict({thread: {core} for thread in threads})
    try:
        yield
    finally:
        _restrict(before)


def _restrict(cores_of: dict[int, set[int]]) -> None:
    for thread, cores in cores_of.items():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)


def _seconds(path: Path) -> float:
    with contextlib.suppress(OSError):
        return sum(map(int, _fields(path)[11:13])) / _TICKS_PER_S
    return 0.0


def _fields(path: Path) -> list[str]:
    """Returns the fields of a `stat` file after the name, which may hold spaces: state, parent and so on."""
    return path.read_text().rpartition(")")[2].split()
