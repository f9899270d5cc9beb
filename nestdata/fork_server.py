"""The fork server of this process: it imports modules once, and workers are forked from it.

A process that has threads must not be forked: a thread may hold a lock at that moment, which nobody releases in the
child. The fork server has no threads. It ignores the signals of the job, which its workers inherit, and ends with the
process that started it and all workers.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.util import _finalizer_registry  # type: ignore[attr-defined]  # not annotated
from typing import Any

JOB_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
"""Signals that a whole job receives; blocked in the fork server and, until they unblock them, in its workers."""


def start(preload: Sequence[str] = ()) -> None:
    """Starts the fork server; does nothing if it runs already.

    Returns at once: the modules are imported meanwhile.

    Args:
        preload: Modules that the fork server imports for all of its workers.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    # The resource tracker ignores SIGINT and SIGTERM by itself; starting it unblocks them.
    with _blocked({signal.SIGUSR1}):
        resource_tracker.ensure_running()
    with _blocked(JOB_SIGNALS):
        forkserver.ensure_running()


def end_with_parent() -> None:
    """Lets this worker end, from now on, as soon as the process that owns it has ended.

    Its parent in the sense of the operating system is the fork server, which a killed owner cannot end.
    """
    threading.Thread(target=_exit_after_parent, daemon=True).start()


@contextmanager
def _blocked(signals: set[signal.Signals] | frozenset[signal.Signals]) -> Iterator[None]:
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


class UnnamedContext(ForkServerContext):
    """The fork server as a multiprocessing context that leaves no semaphores behind and checks its workers.

    Semaphores for a fork server have names in /dev/shm, by which workers open them. If all processes are killed at
    once, including the one that cleans up, the files stay. Their names are therefore removed as soon as all workers
    have opened them.

    The owner of a worker gets no SIGCHLD when the worker dies, since the fork server is its parent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._semaphores: list[Any] = []
        self._processes: list[Any] = []

    def check_processes(self) -> None:
        """Raises RuntimeError if a process was killed or has failed."""
        for process in self._processes:
            code = process.exitcode
            if code:
                how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                raise RuntimeError(
                    f"worker {process.name} (pid {process.pid}) {how}. SIGKILL usually means that memory ran out: use "
                    "fewer workers."
                )

    def remove_names(self) -> None:
        """Removes the names of all semaphores made so far; processes that have not opened them can no longer do so."""
        made = {id(semaphore) for semaphore in self._semaphores}
        for finalizer in list(_finalizer_registry.values()):
            of_object = getattr(finalizer, "_weakref", None)
            if of_object is not None and id(of_object()) in made:
                finalizer()  # created with the semaphore; removes its name, at most once
        self._semaphores.clear()

    def Process(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        self._processes.append(super().Process(*arguments, **options))
        return self._processes[-1]

    def Lock(self) -> Any:  # noqa: D102
        return self._noted(super().Lock())

    def Semaphore(self, value: int = 1) -> Any:  # noqa: D102
        return self._noted(super().Semaphore(value))

    def BoundedSemaphore(self, value: int = 1) -> Any:  # noqa: D102
        return self._noted(super().BoundedSemaphore(value))

    def _noted(self, semaphore: Any) -> Any:
        self._semaphores.append(semaphore)
        return semaphore
