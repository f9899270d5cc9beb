"""`ReadAhead`: fetches the bytes of the current and the next microbatches of a process by threads, in order."""

import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from typing import NamedTuple

from nestdata.corpus.addresses import Address
from nestdata.redaction import redacted
from nestdata.storage import DaemonPool

_log = logging.getLogger(__name__)

# Time in seconds after which a log says that a batch waits for a store.
_WARN_AFTER_S = 5.0


class Request(NamedTuple):
    """The bytes of one member. Equal requests are fetched once."""

    address: Address
    is_pinned: bool = False
    """Whether the cache keeps the bytes."""

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.address.length


Fetch = Callable[[Request], bytes | None]


class ReadAhead:
    """Holds the bytes of the microbatch that a process loads, and of the next ones, within a limit.

    Bytes are requested in the order in which they are needed; more are requested as others are taken. A member of any
    length is requested while its predecessor is decoded. Bytes are dropped when they are no longer needed; within the
    limit, they are not dropped earlier. Errors are raised by `take`, which first repeats a request that has failed.
    Used by one thread.

    Args:
        fetch: Returns the bytes of a request; None if it cannot, and the caller has to find out why. Called by several
            threads.
        num_threads: Largest number of calls of `fetch` at the same time.
        max_bytes: Limit for the bytes that are held or requested. One member may exceed it.
    """

    waited_s: float = 0.0
    """Seconds for which `take` has waited for bytes."""

    held_bytes: int = 0
    """Bytes that are held or requested."""

    def __init__(self, fetch: Fetch, *, num_threads: int, max_bytes: int) -> None:
        self._fetch = fetch
        self._max_bytes = max_bytes
        self._pool = DaemonPool(num_threads, "read-ahead")
        weakref.finalize(self, self._pool.close).atexit = False
        self._held: dict[Request, Future[bytes | None]] = {}
        self._untaken: set[Request] = set()
        """Requests in `_held` whose bytes were never taken."""

        self._uses: Counter[Request] = Counter()
        self._later: deque[Request] = deque()
        """Further uses, in order, that the limit does not allow yet."""

    def begin(self, current: Sequence[Request], upcoming: Iterable[Sequence[Request]]) -> None:
        """Begins a microbatch.

        Args:
            current: Requests of this microbatch, one for each call of `take`.
            upcoming: The same for the next microbatches.
        """
        self._later = deque(chain(current, *upcoming))
        self._uses = Counter(self._later)
        for request in self._held.keys() - self._uses.keys():
            self._drop(request)
        self._request_more()

    def take(self, request: Request, on_wait: Callable[[], None] = lambda: None) -> bytes | None:
        """Returns the bytes of a request; waits until they have arrived.

        Args:
            request: A request of the current microbatch, or any other, which is then fetched now.
            on_wait: Called before waiting.

        Raises:
            Exception: Any error that `fetch` raised for this request.
        """
        future = self._held.get(request)
        if future is None or not future.done() or future.exception() is not None:
            on_wait()
            began = time.monotonic()
            future = self._awaited(request, future)
            self.waited_s += time.monotonic() - began
        self._uses[request] -= 1
        self._untaken.discard(request)
        # Bytes that exceed the limit are requested again for their next use.
        if self._uses[request] <= 0 or self.held_bytes > self._max_bytes:
            self._drop(request)
        self._request_more()
        return future.result()

    def _awaited(self, request: Request, future: "Future[bytes | None] | None") -> "Future[bytes | None]":
        """Waits for the bytes of a request, or fetches them now if they were not requested or could not be fetched."""
        if future is not None and not future.done():
            if not wait([future], _WARN_AFTER_S).done:
                _log.warning("waiting for %s", redacted(request.address.location))
                wait([future])
            return future
        # The store may have recovered since.
        future = Future()
        try:
            future.set_result(self._fetch(request))
        except BaseException as error:
            future.set_exception(error)
        return future

    def _request_more(self) -> None:
        """Requests bytes, in order, as far as the limit allows."""
        while self._later:
            request = self._later[0]
            if request not in self._held and self._uses[request] > 0:
                if self.held_bytes + request.length > self._max_bytes and self._untaken:
                    return
                self._held[request] = self._pool.submit(self._fetch, request)
                self._untaken.add(request)
                self.held_bytes += request.length
            self._later.popleft()

    def _drop(self, request: Request) -> None:
        future = self._held.pop(request, None)
        if future is not None:
            future.cancel()
            self._untaken.discard(request)
            self.held_bytes -= request.length
