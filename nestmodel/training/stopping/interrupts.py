"""Ctrl-C during training: the first one asks the run to end, the second one ends the process at once.

A terminal sends SIGINT to all processes of a run. Python runs signal handlers in the main thread only, which may be
waiting in a collective. A thread therefore reads the signals from a pipe.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any, NoReturn

import nestguard
from nestmodel.training.starting.origin import is_first_rank
from nestmodel.training.stopping.exit_codes import EXIT_INTERRUPTED

_LEAVE_S = 1.0
"""Seconds that the other ranks have to end after the second Ctrl-C."""

_NOTICE = "Ctrl-C: the run ends after this step, with a checkpoint. Press it again to end at once, without one."


class InterruptWatch:
    """Counts Ctrl-C from `start` to `stop`. It changes nothing if SIGINT was ignored before, as under nohup.

    Args:
        on_first: Called in the thread at the first Ctrl-C.
        started_ranks: Returns the ranks that this process has started, which the second one ends as well.
    """

    def __init__(self, on_first: Callable[[], None], started_ranks: Callable[[], Sequence[Any]] = list) -> None:
        self._on_first = on_first
        self._started_ranks = started_ranks
        self._previous_handler: Any = None
        self._previous_wakeup_fd = -1
        self._read_fd = self._write_fd = -1

    def start(self) -> None:
        """Installs the signal handler and starts the thread. Call it in the main thread."""
        self._previous_handler = signal.getsignal(signal.SIGINT)
        if self._previous_handler is signal.SIG_IGN:
            return
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        _close_wakeup_fd_in_forks()
        # Before the handler: a signal between the two would be lost.
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
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
                    _leave(self._started_ranks())
                self._on_first()
                if is_first_rank():
                    # Not through `sys.stderr`: a panel redirects it and locks. The reader of a pipe may be gone.
                    with suppress(OSError):
                        os.write(2, f"\n{_NOTICE}\n".encode())
        os.close(self._read_fd)


def _leave(started_ranks: Sequence[Any]) -> NoReturn:
    """Ends this process and its ranks at once, from the thread, without clean-up: the user has given the run up."""
    nestguard.current().finish(nestguard.Phase.LEAVING)
    deadline_s = time.monotonic() + _LEAVE_S
    while (left := [rank for rank in started_ranks if rank.poll() is None]) and time.monotonic() < deadline_s:
        for rank in left:
            rank.send_signal(signal.SIGINT)  # which is its second one
        time.sleep(_LEAVE_S / 10)
    for rank in left:
        rank.kill()
    if is_first_rank():
        with suppress(OSError):
            os.write(2, b"error: Ctrl-C twice: the run has ended without a new checkpoint.\n")
    os._exit(EXIT_INTERRUPTED)


@cache
def _close_wakeup_fd_in_forks() -> None:
    """Keeps forked loader workers from writing the signals that they receive into the pipe of their rank."""

    def close() -> None:
        signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=close)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Handles SIGINT. Without a handler in Python, the interpreter would not write the signal to the pipe."""
