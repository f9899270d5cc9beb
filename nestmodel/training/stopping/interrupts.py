"""Ctrl-C during training: the first one asks the run to end, the second one ends the process at once.

A terminal sends SIGINT to all processes of a run. Python runs signal handlers in the main thread only, which may be
waiting in a collective. A thread therefore reads the signals from a pipe.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

from nestmodel.training.starting.origin import is_first_rank
from nestmodel.training.starting.startup import exit_interrupted, handler_before, wakeup_fd_before

_NOTICE = "Ctrl-C: the run ends after this step, with a checkpoint. Press it again to end at once, without one."


class InterruptWatch:
    """Counts Ctrl-C from `start` to `stop`. It changes nothing if SIGINT was ignored before, as under nohup.

    Args:
        on_first: Called in the thread at the first Ctrl-C.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._previous_handler: Any = None
        self._previous_wakeup_fd = -1
        self._read_fd = self._write_fd = -1

    def start(self) -> None:
        """Installs the signal handler and starts the thread. Call it in the main thread."""
        self._previous_handler = handler_before(signal.SIGINT)
        if self._previous_handler is signal.SIG_IGN:
            return
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        _close_wakeup_fd_in_forks()
        # Before the handler: a signal between the two would be lost.
        self._previous_wakeup_fd = wakeup_fd_before(signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False))
        signal.signal(signal.SIGINT, _do_nothing)
        threading.Thread(target=self._run, name="interrupt-watch", daemon=True).start()

    def stop(self) -> None:
        """Restores the previous handler and ends the thread. Call it in the main thread."""
        if self._write_fd == -1:
            return
        signal.signal(signal.SIGINT, self._previous_handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._write_fd)  # the thread reads the end of the pipe
        self._write_fd = -1

    def _run(self) -> None:
        num_interrupts = 0
        while numbers := os.read(self._read_fd, 64):
            for _ in range(numbers.count(signal.SIGINT)):
                num_interrupts += 1
                if num_interrupts > 1:
                    exit_interrupted()
                self._on_first()
                if is_first_rank():
                    # Not through `sys.stderr`: a panel redirects it and locks. The reader of a pipe may be gone.
                    with suppress(OSError):
                        os.write(2, f"\n{_NOTICE}\n".encode())
        os.close(self._read_fd)


@cache
def _close_wakeup_fd_in_forks() -> None:
    """Keeps forked loader workers from writing the signals that they receive into the pipe of their rank."""

    def close() -> None:
        signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=close)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Handles SIGINT. Without a handler in Python, the interpreter would not write the signal to the pipe."""
