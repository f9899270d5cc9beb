"""Starts a process that ends when this process ends, also if this one is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Runs a command until standard input ends, which happens at the latest when the process that holds its other end dies.
_SUPERVISOR = """
import os, signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def end():
    sys.stdin.buffer.read()
    child.kill()
threading.Thread(target=end, daemon=True).start()
os._exit(child.wait() & 127)
"""


@contextmanager
def supervised(command: Sequence[str], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command during the block; its output goes to a file. Yields a process that ends with it."""
    with log.open("ab") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _SUPERVISOR, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the tests; they end the process
            cwd=log.parent,
        )
    try:
        yield supervisor
    finally:
        assert supervisor.stdin is not None
        supervisor.stdin.close()
        try:
            supervisor.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(supervisor.pid, signal.SIGKILL)
            supervisor.wait()
