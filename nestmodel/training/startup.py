"""Clean exits while a run starts: no process is left behind, and every exit code is a documented one.

From the first line of `nestmodel fit` until training takes over the signals, a process imports torch, starts the other
ranks and waits for them, much of it inside C++ code where Python's signal handlers do not run. A thread therefore
reads the signals from a pipe, watches the ranks that Lightning has started from here, and watches the process that has
started this one. It imports nothing outside the standard library except `nestguard`.
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
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import nestguard

EXIT_PREEMPTED = 75
"""Exit code of a run that was asked to exit: start it again with `--ckpt_path last`."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""

STARTER = "NESTMODEL_STARTER"
"""Environment variable with the pid of the process that starts ranks through Lightning. Remove it from the environment
of ranks that are started from there in another way."""

_POLL_S = 0.25
_ORPHAN_GRACE_S = 5.0
"""Once training has begun, a rank whose launcher has gone waits this long, so that the stall guard can report first."""

_EXIT_CODES = {signal.SIGTERM: EXIT_PREEMPTED, signal.SIGUSR1: EXIT_PREEMPTED, signal.SIGINT: EXIT_INTERRUPTED}


class _Origin(NamedTuple):
    run_id: str
    is_started_by_lightning: bool


@cache
def _origin() -> _Origin:
    """Cached, because Lightning sets LOCAL_RANK in the launching process as well."""
    if "LOCAL_RANK" not in os.environ:
        os.environ[STARTER] = str(os.getpid())  # inherited by the ranks that Lightning starts from here
        return _Origin(str(os.getpid()), False)
    starter = os.environ.get(STARTER)
    if starter is not None and (int(starter) == os.getppid() or not _exists(int(starter))):
        return _Origin(starter, True)
    return _Origin(f"{os.getppid()}-{os.environ.get('MASTER_PORT', '')}", False)


def record_launcher() -> None:
    """Records how this process was started; call it before any `fit`."""
    _origin()


def is_started_by_lightning() -> bool:
    """Tells whether another rank of this machine has started this process through Lightning."""
    return _origin().is_started_by_lightning


def local_run_id() -> str:
    """Returns a name that is shared by the ranks that one process or launcher has started on this machine."""
    return _origin().run_id


class StartupWatch:
    """Exits this process with a documented code when it is signalled, orphaned, or one of its ranks fails to start.

    While it is active, SIGTERM and SIGUSR1 exit with `EXIT_PREEMPTED` and SIGINT with `EXIT_INTERRUPTED`, whatever the
    main thread is doing. A rank that Lightning has started exits when its launcher is gone, also after `release`.
    """

    def __init__(self) -> None:
        record_launcher()
        self._started_ranks: Callable[[], Sequence[subprocess.Popen[Any]]] = list
        self._previous: dict[signal.Signals, Any] = {}
        self._is_active = False
        self._read_fd = self._write_fd = -1

    def start(self) -> None:
        """Takes over the signals; does nothing outside the main thread, where they cannot be handled."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        for number in _EXIT_CODES:
            # A signal that is ignored from outside, as under nohup, stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, _do_nothing)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._is_active = True
        threading.Thread(target=self._run, name="startup-watch", daemon=True).start()

    def watch_ranks(self, started_ranks: Callable[[], Sequence[subprocess.Popen[Any]]]) -> None:
        """Exits as soon as one of these processes ends with an error, until `release`."""
        self._started_ranks = started_ranks

    def release(self) -> None:
        """Gives the signals back, except those that have another handler by now."""
        if not self._is_active:
            return
        self._is_active = False
        for number, handler in self._previous.items():
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, handler)
        signal.set_wakeup_fd(-1)

    def _run(self) -> None:
        orphaned_at_s: float | None = None
        while self._is_active or is_started_by_lightning():
            if self._is_active:
                select.select([self._read_fd], [], [], _POLL_S)
                self._exit_on_signal()
                self._exit_on_failed_rank()
            else:
                time.sleep(_POLL_S)
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
            if self._is_active and number in _EXIT_CODES:
                name = signal.Signals(number).name
                self._end_ranks()
                _exit(_EXIT_CODES[signal.Signals(number)], f"{name} during start-up; nothing was trained")

    def _exit_on_failed_rank(self) -> None:
        for process in self._started_ranks():
            code = process.poll()
            if code and self._is_active:
                ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                self._end_ranks()
                _exit(max(code, 1), f"a rank that was started from here has ended {ended} during start-up")

    def _end_ranks(self) -> None:
        for process in self._started_ranks():
            process.terminate()


_watch: StartupWatch | None = None


@contextmanager
def watch_startup() -> Iterator[StartupWatch]:
    """Watches the start of a run until `end_startup` is called, or the block is left."""
    global _watch
    _watch = StartupWatch()
    _watch.start()
    try:
        yield _watch
    finally:
        end_startup()
        _watch = None


def watch_ranks(started_ranks: Callable[[], Sequence[subprocess.Popen[Any]]]) -> None:
    """Ends the start of a run when one of these processes fails, if the start is being watched."""
    if _watch is not None:
        _watch.watch_ranks(started_ranks)


def end_startup() -> None:
    """Ends the watch of the start, if there is one: from here on training handles signals."""
    if _watch is not None:
        _watch.release()


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """A handler in Python, without which the interpreter would not write signals to the pipe."""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _exit(code: int, reason: str) -> None:
    """Ends the process from a thread. Nothing has been trained that an orderly exit would save."""
    nestguard.current().finish(nestguard.Phase.LEAVING)
    sys.stderr.write(f"error: {reason}.\n")
    sys.stderr.flush()
    os._exit(code)
