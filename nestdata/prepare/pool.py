"""Worker processes of `prepare`, on this machine or in a running Dask cluster."""

import logging
import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from nestdata import fork_server
from nestdata.errors import ConfigError, CorpusError
from nestdata.storage import StoreEnvironment

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)
# Minimum number of tasks submitted to a cluster at a time: workers may join after the number of threads was read.
_MIN_SUBMITTED = 64
_DASK_TIMEOUT_S = 10.0


class Pool:
    """Applies functions to tasks and returns the results in order.

    Args:
        executor: Runs the tasks; None to run them in this process.
        max_submitted: Maximum number of submitted tasks whose results have not been taken; must be large enough to keep
            every process busy.
    """

    def __init__(self, executor: Executor | None, max_submitted: int) -> None:
        self._executor = executor
        self._max_submitted = max_submitted

    def map(self, function: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[_Result]:
        """Yields the results in the order of the tasks, and takes tasks only as fast as they are processed.

        Raises:
            CorpusError: A worker process ended unexpectedly.
        """
        if self._executor is None:
            yield from map(function, tasks)
            return
        submitted: deque[Future[_Result]] = deque()
        try:
            for task in tasks:
                with _delayed_ctrl_c():
                    submitted.append(self._executor.submit(function, task))
                if len(submitted) >= self._max_submitted:
                    yield submitted.popleft().result()
            while submitted:
                yield submitted.popleft().result()
        except BrokenExecutor as error:
            raise CorpusError(
                "a worker process ended unexpectedly: it was killed, perhaps because memory ran out, or a decoder "
                "crashed. Use fewer --jobs; with --jobs 1 the crash of a decoder is visible."
            ) from error


@contextmanager
def open_pool(jobs: int, dask: str | None = None, *, preload: Sequence[str] = ()) -> Iterator[Pool]:
    """Yields a pool of `jobs` processes, or of the workers of a Dask cluster.

    Args:
        jobs: Number of processes on this machine; with 1, tasks run in the calling process.
        dask: Address of a scheduler, such as `tcp://host:8786`. Its workers need this package and the same files.
        preload: Modules that every process needs. They are imported once, before the processes are forked, unless the
            fork server was running already.

    Raises:
        ConfigError: `jobs` is below 1, Dask is not installed, or no scheduler answers at the address.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}: give at least 1.")
    if dask is not None:
        with _dask_client(dask) as client:
            num_threads = sum(client.nthreads().values())
            if not num_threads:
                _log.warning("the Dask scheduler at %s has no workers; waiting until one joins", dask)
            # Not pure: tasks write files, so a result of an earlier run must not be reused.
            yield Pool(client.get_executor(pure=False), max(_MIN_SUBMITTED, 2 * num_threads + 1))
    elif jobs == 1:
        yield Pool(None, 1)
    else:
        with _local_processes(jobs, preload) as executor:
            yield Pool(executor, 2 * jobs + 1)


@contextmanager
def _local_processes(number: int, preload: Sequence[str]) -> Iterator[Executor]:
    """Yields an executor whose processes are killed as soon as the caller's block raises an error."""
    # The fork server has no threads, so forking it is safe; it imports the preloaded modules once for all processes.
    context = multiprocessing.get_context("forkserver")
    with _delayed_ctrl_c():
        fork_server.start(preload)
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(
        number, mp_context=context, initializer=_start_worker, initargs=(StoreEnvironment(),)
    ) as executor:
        try:
            yield executor
        except BaseException:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
            raise


@contextmanager
def _delayed_ctrl_c() -> Iterator[None]:
    """Delays Ctrl-C until the end of the block, in which a process may be started.

    An interrupt during the start would leave an orphaned process, and print a second traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending = []
    before = signal.signal(signal.SIGINT, lambda number, _: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            signal.raise_signal(signal.SIGINT)


def _dask_client(address: str) -> Any:
    try:
        from distributed import Client
        from distributed.comm.addressing import parse_address
        from distributed.comm.registry import get_backend
    except ImportError:
        raise ConfigError("--dask needs Dask. Install it with `pip install 'nest-pretrain[dask]'`.") from None
    try:
        get_backend(parse_address(address)[0])  # a client with an unknown protocol may wait forever
        return Client(address, timeout=_DASK_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no Dask scheduler answers at {address} ({error}). Start it, or check the address."
        ) from error


def _start_worker(environment: StoreEnvironment) -> None:
    environment.apply()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # if the fork server was started elsewhere, SIGINT is not blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1})
    fork_server.end_with_parent()
