"""The fork server of this process: it imports modules once, and workers are forked from it.

A process that has threads must not be forked: a thread may hold a lock at that moment, which nobody releases in the
child. The fork server has no threads. It ignores the signals of the job, which its workers inherit, and ends with the
process that started it and all workers.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from multiprocessing.util import _finalizer_registry  # type: ignore[attr-defined]  # not annotated
from pathlib import Path
from typing import Any

from nestdata.errors import StorageError

JOB_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
"""Signals that a whole job receives, and SIGUSR2, which ends loader workers. Blocked in the fork server and, until they
unblock them, in its workers."""


_SHARED_MEMORY = Path("/dev/shm")

_imports_main = True
"""Whether workers import the main module of this process again."""


def start(preload: Sequence[str] = (), *, imports_main: bool = True) -> None:
    """Starts the fork server; does nothing if it runs already.

    Returns at once: the modules are imported meanwhile.

    Args:
        preload: Modules that the fork server imports for all of its workers.
        imports_main: Whether workers of an `UnnamedContext` import the main module, as Python's own do. False for a
            program whose workers need nothing of it: a start script without `if __name__ == "__main__":` would start
            the program in every worker. Stays False for the process.
    """
    global _imports_main
    _imports_main = _imports_main and imports_main
    multiprocessing.get_context("forkserver").set_forkserver_preload([*preload, "nestdata.freeze"])
    # The resource tracker ignores SIGINT and SIGTERM by itself; starting it unblocks them.
    with blocked({signal.SIGUSR1}):
        resource_tracker.ensure_running()
    with blocked(JOB_SIGNALS):
        forkserver.ensure_running()


def end_with_parent() -> None:
    """Lets this worker end, from now on, as soon as the process that owns it has ended.

    For the operating system, its parent is the fork server, which stays if its owner is killed.
    """
    threading.Thread(target=_exit_after_parent, daemon=True).start()


@contextmanager
def blocked(signals: set[signal.Signals] | frozenset[signal.Signals]) -> Iterator[None]:
    """Blocks signals in this thread, and in processes that it starts, during the `with` block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _free_space() -> str:
    """Returns the free space of the directory of semaphores, for a message, if it is known."""
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return ""
    return f"; {usage.free >> 10} of {usage.total >> 10} KiB are free"


class _Worker(ForkServerProcess):
    """A worker that does not import the main module if `start` was told so."""

    def start(self) -> None:
        main = sys.modules["__main__"]
        spec = main.__spec__
        if not _imports_main:
            # Python does not import a `__main__` of a package again, since it cannot have a guard.
            main.__spec__ = ModuleSpec("program.__main__", None)
        try:
            super().start()
        finally:
            main.__spec__ = spec


class UnnamedContext(ForkServerContext):
    """The fork server as a multiprocessing context that leaves no semaphores behind and knows its workers.

    Semaphores for a fork server have names in /dev/shm, by which workers open them. If all processes are killed at
    once, including the one that cleans up, the files stay. Their names are therefore removed as soon as all workers
    have opened them.

    The owner of a worker gets no SIGCHLD when the worker dies, since the fork server is its parent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._finalizers: list[Any] = []
        self._processes: list[BaseProcess] = []

    def failed_process(self) -> BaseProcess | None:
        """Returns a process that was killed or has failed; None if there is none."""
        return next((process for process in self._processes if process.exitcode), None)

    def remove_names(self) -> None:
        """Removes the names of all semaphores made so far; processes that have not opened them can no longer do so."""
        for finalizer in self._finalizers:
            finalizer()
        self._finalizers.clear()

    def Process(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        self._processes.append(_Worker(*arguments, **options))
        return self._processes[-1]

    def Lock(self) -> Any:  # noqa: D102
        return self._noted(super().Lock)

    def Semaphore(self, value: int = 1) -> Any:  # noqa: D102
        return self._noted(super().Semaphore, value)

    def BoundedSemaphore(self, value: int = 1) -> Any:  # noqa: D102
        return self._noted(super().BoundedSemaphore, value)

    def _noted(self, make: Callable[..., Any], *options: int) -> Any:
        """Makes a semaphore, and notes the finalizer that is created with it; it removes the name, at most once."""
        before = set(_finalizer_registry)
        try:
            semaphore = make(*options)
        except OSError as error:
            raise StorageError(
                f"{_SHARED_MEMORY}: no semaphore for workers can be created there, which takes a page "
                f"({error.strerror}{_free_space()}). Remove files from it, give the container more (--shm-size), or "
                "use no workers."
            ) from error
        self._finalizers += [_finalizer_registry[key] for key in set(_finalizer_registry) - before]
        return semaphore
