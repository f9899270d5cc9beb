"""Threads for requests to object stores, for which the exit of the process does not wait."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")

_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonPool:
    """Makes calls in threads, in the order in which they are submitted.

    The threads end with the process, even during a call. For the threads of a `ThreadPoolExecutor`, Python would wait
    at exit, for as long as a store does not answer.

    Args:
        num_threads: Largest number of calls at the same time.
        name: Name of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()

    def submit(self, call: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        """Returns the future of a call, which is not made if the future is cancelled before.

        Raises:
            RuntimeError: This process was forked from the one that owns the threads.
        """
        if os.getpid() != self._process:
            raise RuntimeError(f"the threads {self._name} belong to the process that this one was forked from.")
        future: Future[Result] = Future()
        self._calls.put((future, call, arguments))
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """Ends the threads after the calls that were submitted."""
        for _ in self._threads:
            self._calls.put(None)


def _work(calls: "SimpleQueue[_Call | None]") -> None:
    while _make_call(calls.get()):
        pass


def _make_call(call: _Call | None) -> bool:
    """Makes a call and returns True; False for None."""
    if call is None:
        return False
    future, function, arguments = call
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # such as a panic of obstore, after which the caller would wait forever
            future.set_exception(error)
    return True
