"""A terminal for programs under test: a pty, and a screen that shows what they write."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte


class Terminal:
    """A pty whose other end is drawn on a screen; the lines that scroll off it are kept."""

    def __init__(self, columns: int = 80, lines: int = 60) -> None:
        self._master, self.slave = pty.openpty()
        self.screen = pyte.HistoryScreen(columns, lines, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    @contextmanager
    def as_stderr(self) -> Iterator[None]:
        """Puts the terminal in place of `sys.stderr`; within a test, because pytest sets it for each phase."""
        before = sys.stderr
        with open(os.dup(self.slave), "w", encoding="utf-8") as sys.stderr:
            try:
                yield
            finally:
                sys.stderr = before

    def lines(self) -> list[str]:
        """Returns the lines that have been written, from the first to the last that is not empty."""
        self._read(0.0)
        history = ["".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top]
        lines = [line.rstrip() for line in [*history, *self.screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def run(self, command: Sequence[object], cwd: Path, environment: dict[str, str], timeout_s: float = 400.0) -> int:
        """Runs a program whose standard error and output are the terminal; returns its exit code."""
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=environment,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
        )
        deadline_s = time.monotonic() + timeout_s
        while process.poll() is None:
            if time.monotonic() > deadline_s:
                process.kill()
            self._read(0.1)
        return process.returncode

    def close(self) -> None:
        os.close(self._master)
        os.close(self.slave)

    def _read(self, seconds: float) -> None:
        while select.select([self._master], [], [], seconds)[0]:
            self._stream.feed(os.read(self._master, 65536))
