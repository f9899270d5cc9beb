"""Kills every process with a marker in its environment, and removes a folder, when standard input ends.

That happens at the latest when the process that holds its other end dies.

python -m tests.slurm.reaper NAME=VALUE FOLDER
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

DEADLINE_S = 30


def processes_with(marker: str) -> list[int]:
    """Returns the processes that have a variable in their environment, zombies excluded."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and marker.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def kill_all(marker: str) -> None:
    """Kills all of them, also those that they start meanwhile."""
    deadline = time.monotonic() + DEADLINE_S
    while (pids := processes_with(marker)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_all(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
