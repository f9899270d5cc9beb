"""Processes that share the work of one run: on this machine, or on a Dask cluster that is already there."""

import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import Any, TypeVar

from nestdata.errors import ConfigError, CorpusError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)
# Tasks under way on a cluster, at least: more of its workers may yet come.
_LEAST_UNDER_WAY = 64
_DASK_TIMEOUT_S = 10.0


class Pool:
    """Applies a function to tasks, in order, with no more of them under way than keeps every process busy."""

    def __init__(self, executor: Executor | None, most_under_way: int) -> None:
        self._executor = executor
        self._most_under_way = most_under_way

    def map(self, function: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[_Result]:
        """Yields the results in the order of the tasks, of which only a few are held at a time.

        Raises:
            CorpusError: A process ended before its work did.
        """
        if self._executor is None:
            yield from map(function, tasks)
            return
        under_way: deque[Future[_Result]] = deque()
        try:
            for task in tasks:
                with _ctrl_c_later():
                    under_way.append(self._executor.submit(function, task))
                if len(under_way) >= self._most_under_way:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenExecutor as error:
            raise CorpusError(
                "a process that looked at audio ended before its work did: it was killed, perhaps for want of memory, "
                "or a decoder crashed. Use fewer --jobs; with --jobs 1 the decoder shows itself."
            ) from error
        finally:
            for future in under_way:
                future.cancel()


@contextmanager
def open_pool(jobs: int, dask: str | None = None) -> Iterator[Pool]:
    """Yields a pool of `jobs` processes, or of the workers of a Dask cluster.

    Args:
        jobs: Processes on this machine; with 1, the work is done in this one.
        dask: Address of a scheduler, such as `tcp://host:8786`. Its workers need this package and the same files.

    Raises:
        ConfigError: There are fewer than one job, Dask is not installed, or nothing answers at the address.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}: give at least 1.")
    if dask is not None:
        with _dask_client(dask) as client:
            num_threads = sum(client.nthreads().values())
            if not num_threads:
                _log.warning("the Dask scheduler at %s has no workers; waiting for some", dask)
            # Not pure: what a task writes to disk is written again by every run.
            yield Pool(client.get_executor(pure=False), max(_LEAST_UNDER_WAY, 2 * num_threads + 1))
    elif jobs == 1:
        yield Pool(None, 1)
    else:
        with _processes(jobs) as executor:
            yield Pool(executor, 2 * jobs + 1)


@contextmanager
def _processes(number: int) -> Iterator[Executor]:
    """Yields an executor whose processes end at once when an error passes, whatever they are at."""
    # Forked from a process of its own, which has no threads; the package is imported there once for all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nestdata.prepare.run"])
    with _ctrl_c_later():
        _start_fork_server()
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(number, mp_context=context, initializer=_start_worker) as executor:
        try:
            yield executor
        except BaseException:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
            raise


def _start_fork_server() -> None:
    """Starts what all processes are forked from, deaf to Ctrl-C as they are: it is for this process to end the work."""
    resource_tracker.ensure_running()  # which would let the signal through again if it were started later
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Puts off Ctrl-C while a process may be starting: interrupted there, it would be lost and complain for itself."""
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
        get_backend(parse_address(address)[0])  # a client of a protocol that does not exist may wait forever
        return Client(address, timeout=_DASK_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no Dask scheduler answers at {address} ({error}). Start it, or check the address."
        ) from error


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where the fork server had been running already
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, which a killed parent cannot do."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
