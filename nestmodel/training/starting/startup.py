"""Clean exits during the start of a run: no process is left behind, and every exit code is a documented one.

Before training installs its own signal handlers, `nestmodel fit` imports torch, starts the other ranks and waits for
them. Much of this happens in C++ code, during which Python cannot run signal handlers. A thread therefore reads the
signals from a pipe. It also watches the ranks that Lightning started from this process, and the process that started
this one. It ends the process by `os._exit`, which skips clean-up; nothing has been trained that could be lost. This
module imports nothing outside the standard library except `nestguard` and `origin`, so that the watch can begin before
torch is imported.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import nestguard
from nestmodel.training.starting.origin import is_first_rank, is_started_by_lightning, local_run_id, record_launcher

EXIT_PREEMPTED = 75
"""Exit code of a preempted run: start it again with `--ckpt_path last`."""

EXIT_NOT_SAVED = 74
"""Exit code of a run whose last checkpoint could not be written: make space, then resume from the one before."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_POLL_S = 0.25
_ORPHAN_GRACE_S = 5.0
"""After start-up, a rank whose launching process has ended exits after this delay, so that the stall guard can report
first."""

_INTERRUPT_S = 1.0
"""Seconds that ranks have to end after Ctrl-C was pressed twice."""

_EXIT_CODES = {signal.SIGTERM: EXIT_PREEMPTED, signal.SIGUSR1: EXIT_PREEMPTED, signal.SIGINT: EXIT_INTERRUPTED}


class StartupWatch:
    """Exits this process with a documented code on a signal, if it is orphaned, or if one of its ranks fails to start.

    While the watch is active, SIGTERM and SIGUSR1 exit with `EXIT_PREEMPTED` and SIGINT with `EXIT_INTERRUPTED`,
    whatever the main thread is doing. A rank that Lightning started exits when its launching process has ended, also
    after `release`.
    """

    def __init__(self) -> None:
        record_launcher()
        self._started_ranks: Callable[[], Sequence[subprocess.Popen[Any]]] = list
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._previous_wakeup_fd = -1
        self._is_active = False
        # Held while signals are acted on, so that `release` cannot return between the read of a signal and the exit.
        self._lock = threading.Lock()
        self._read_fd = self._write_fd = -1

    @property
    def is_active(self) -> bool:
        """Whether the start is watched: from `start` to `release`."""
        return self._is_active

    def start(self) -> None:
        """Installs the signal handlers and starts the thread; does nothing outside the main thread.

        Python allows signal handlers to be installed in the main thread only.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        # Before the handlers: a signal between the two would be lost.
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        # SIGCHLD wakes the thread as soon as a rank ends. Lightning polls the ranks too, and answers the failure of one
        # with SIGKILL to all processes, this one included.
        for number in (*_EXIT_CODES, signal.SIGCHLD):
            # A signal that was ignored before, as under nohup, stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, _do_nothing)
        signal.siginterrupt(signal.SIGCHLD, False)  # C++ code need not expect that its system calls are interrupted
        self._is_active = True
        threading.Thread(target=self._run, name="startup-watch", daemon=True).start()

    def watch_ranks(self, started_ranks: Callable[[], Sequence[subprocess.Popen[Any]]]) -> None:
        """Exits as soon as one of these processes fails, until `release`.

        Args:
            started_ranks: Returns the ranks that this process has started so far. Called in the thread.
        """
        self._started_ranks = started_ranks

    def replaced_handler(self, number: signal.Signals) -> Any:
        """Returns the handler that a signal had before the watch."""
        return self._previous_handlers.get(number, signal.SIG_DFL)

    def replaced_wakeup_fd(self, fd: int) -> int:
        """Returns `fd`, or the one before the watch if `fd` is its own."""
        return self._previous_wakeup_fd if fd == self._write_fd else fd

    def release(self) -> None:
        """Restores the previous signal handlers and pipe, except where others were installed in the meantime.

        Exits if a signal has arrived that the thread has not read yet.
        """
        if not self._is_active:
            return
        for number, handler in self._previous_handlers.items():
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, handler)
        current_fd = signal.set_wakeup_fd(self._previous_wakeup_fd)
        if current_fd != self._write_fd:
            signal.set_wakeup_fd(current_fd)  # of a watch that has begun in the meantime
        with self._lock:
            self._exit_on_signal()
            self._is_active = False  # from here on the thread may close the pipe

    def _run(self) -> None:
        orphaned_at_s: float | None = None
        while self._is_active or is_started_by_lightning() or self._started_ranks():
            if self._is_active:
                select.select([self._read_fd], [], [], _POLL_S)
                with self._lock:
                    if self._is_active:
                        self._exit_on_signal()
                        self._exit_on_failed_rank()
            else:
                time.sleep(_POLL_S)
                self._exit_on_rank_in_startup()
            if is_started_by_lightning() and os.getppid() != int(local_run_id()):
                orphaned_at_s = orphaned_at_s or time.monotonic()
                if self._is_active or time.monotonic() - orphaned_at_s > _ORPHAN_GRACE_S:
                    _exit(EXIT_PREEMPTED, "the process that started this rank has ended")
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _exit_on_signal(self) -> None:
        try:
            numbers = os.read(self._read_fd, 64)
        except BlockingIOError:
            return
        for number in numbers:
            if number in _EXIT_CODES:
                name = signal.Signals(number).name
                self._terminate_ranks()
                _exit(_EXIT_CODES[signal.Signals(number)], f"{name} before training; there is nothing to save")

    def _exit_on_failed_rank(self) -> None:
        for process in self._started_ranks():
            code = process.poll()
            if code:
                self._terminate_ranks()
                # A rank that is asked to leave before it has installed its handlers is ended by the signal itself.
                asked = next((_EXIT_CODES[number] for number in _EXIT_CODES if number == -code), None)
                _exit(
                    asked or max(code, 1),
                    f"a rank that this process started {nestguard.describe_exit(code)} during start-up",
                )

    def _exit_on_rank_in_startup(self) -> None:
        """Exits if a rank was signalled before it released its own watch, which it does a moment after this process.

        Once training has begun, ranks that Lightning started never exit with these codes.
        """
        for process in self._started_ranks():
            if process.poll() in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
                self._terminate_ranks()
                _exit(
                    process.returncode,
                    f"a rank that this process started {nestguard.describe_exit(process.returncode)}",
                )

    def _terminate_ranks(self) -> None:
        for process in self._started_ranks():
            process.terminate()

    def interrupt_ranks(self) -> None:
        """Sends SIGINT to the started ranks until they exit; kills those that still run after `_INTERRUPT_S`."""
        processes = self._started_ranks()
        deadline_s = time.monotonic() + _INTERRUPT_S
        while (left := [process for process in processes if process.poll() is None]) and time.monotonic() < deadline_s:
            for process in left:
                process.send_signal(signal.SIGINT)
            time.sleep(_INTERRUPT_S / 10)
        for process in left:
            process.kill()


_watch: StartupWatch | None = None


@contextmanager
def watch_startup() -> Iterator[StartupWatch]:
    """Watches the start of a run until `end_startup` is called or the `with` block ends."""
    global _watch
    _watch = StartupWatch()
    _watch.start()
    try:
        yield _watch
    finally:
        end_startup()
        _watch.watch_ranks(list)  # the thread need not outlive the command
        _watch = None


def watch_ranks(started_ranks: Callable[[], Sequence[subprocess.Popen[Any]]]) -> None:
    """Makes the active watch, if there is one, exit when a started rank fails; see `StartupWatch.watch_ranks`."""
    if _watch is not None:
        _watch.watch_ranks(started_ranks)


def handler_before(number: signal.Signals) -> Any:
    """Returns the handler of a signal, or the one that the active watch has replaced."""
    handler = signal.getsignal(number)
    return _watch.replaced_handler(number) if handler is _do_nothing and _watch is not None else handler


def wakeup_fd_before(fd: int) -> int:
    """Returns `fd`, or, if it is that of the active watch, the one that the watch has replaced."""
    return fd if _watch is None else _watch.replaced_wakeup_fd(fd)


def is_command() -> bool:
    """Returns whether this process runs a command of `nestmodel`, and ends when the command does."""
    return _watch is not None


def end_startup() -> None:
    """Releases the active watch, if there is one: from here on training handles the signals."""
    if _watch is not None:
        _watch.release()


def exit_interrupted() -> NoReturn:
    """Ends this process and the ranks that it started at once, with `EXIT_INTERRUPTED`; from any thread."""
    nestguard.current().finish(nestguard.Phase.LEAVING)
    if _watch is not None:
        _watch.interrupt_ranks()
    _exit(EXIT_INTERRUPTED, "Ctrl-C twice: the run has ended without a new checkpoint", is_silent=not is_first_rank())


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Handles a signal. Without a handler in Python, the interpreter would not write the signal to the pipe."""


def _exit(code: int, reason: str, *, is_silent: bool = False) -> NoReturn:
    """Ends the process from any thread, without cleanup: nothing has been trained, or the user has given it up."""
    try:
        nestguard.current().finish(nestguard.Phase.LEAVING)
        if not is_silent:
            sys.stderr.write(f"error: {reason}.\n")
            sys.stderr.flush()
    finally:  # the terminal that stderr is connected to may be gone, as the launching process is
        os._exit(code)
