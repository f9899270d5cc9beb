"""Loader workers: how they start, which signals they survive, and how they end."""

import multiprocessing
import os
import signal
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

import nestguard
from nestdata import fork_server
from nestdata.storage import StoreEnvironment

END_SIGNAL = signal.SIGUSR2
"""Ends a loader worker at once, with code 0: torch raises an error in its owner if it ends in another way."""

# Time after SIGTERM at which an alarm ends a loader worker that is still running.
_SECONDS_TO_FINISH = 60
# Modules that a loader worker needs for its first batch, which the fork server imports for all workers.
_NEEDED_BY_WORKERS = ("nestdata.batch.dataset", "nestdata.filters", "soundfile", "miniaudio")

_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "It usually means that memory ran out: use fewer workers.",
    signal.SIGBUS: "It means that a memory-mapped file was cut off, or that shared memory (/dev/shm) is full: use "
    "fewer workers, or give the container more (--shm-size).",
}
"""Meaning of the signal that killed a worker."""


class StartWorker:
    """Initialises a loader worker; torch's loader calls it first.

    Sets the environment variables of object stores, starts the heartbeat, and lets the worker survive a signal to the
    whole job for a while: after SIGTERM or SIGUSR1, the rank that owns the worker completes its step and still needs
    the batches for it.
    """

    def __init__(self, num_workers: int, slot: nestguard.HeartbeatSlot | None) -> None:
        self.num_workers = num_workers
        self.slot = slot
        self.environment = StoreEnvironment()

    def __call__(self, worker_id: int) -> None:
        """Initialises the worker in which it runs; `worker_id` counts from 0."""
        self.environment.apply()
        nestguard.start_worker(worker_id, self.num_workers, self.slot)
        for number in (signal.SIGUSR1, signal.SIGINT):  # the rank handles Ctrl-C for its workers
            signal.signal(number, signal.SIG_IGN)
        # A forked worker inherits the handler of its rank; the default action ends the process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(END_SIGNAL, lambda *_: os._exit(0))
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_TO_FINISH))
        # Blocked by the fork server.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1, END_SIGNAL})
        owner = multiprocessing.parent_process()
        if owner is not None and owner.pid != os.getppid():
            fork_server.end_with_parent()


def end_workers(workers: Iterable[BaseProcess]) -> None:
    """Immediately ends workers whose batches are not needed; after SIGTERM, they would run for up to a minute."""
    for worker in workers:
        if worker.is_alive() and worker.pid is not None:
            os.kill(worker.pid, END_SIGNAL)


def check_workers(server: fork_server.UnnamedContext) -> None:
    """Raises RuntimeError if a worker was killed or has failed."""
    worker = server.failed_process()
    code = worker.exitcode if worker else None
    if worker and code:
        meaning = _MEANINGS.get(-code, "What it printed on stderr says why.")
        raise RuntimeError(f"worker {worker.name} (pid {worker.pid}) {nestguard.describe_exit(code)}. {meaning}")


def start_fork_server(*, imports_main: bool = True) -> None:
    """Starts the process from which loaders with the start method "forkserver" fork their workers.

    Does nothing if it runs already. Otherwise, a loader starts it with its first workers, which then wait until it has
    imported torch. If it is started earlier, it imports torch while the rank does something else.

    Args:
        imports_main: Whether workers import the main module of the program, as Python does by default. With False, the
            program needs no `if __name__ == "__main__":`, but batches must not need anything that its main module
            defines. Once False, it stays False for this process.
    """
    fork_server.start(_NEEDED_BY_WORKERS, imports_main=imports_main)
