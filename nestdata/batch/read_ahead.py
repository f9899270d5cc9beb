"""`ReadAhead`: fetches the bytes of the current and the next microbatches of a process by threads, in order."""

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from nestdata.corpus.addresses import Address


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
    """Holds the bytes of the microbatch that a process loads, and of those that it loads next, within a limit.

    All bytes of the current microbatch are requested at once, then those of the next ones, in the order in which they
    are needed. No bytes are requested twice as long as they are needed, and bytes that are no longer needed are
    dropped. Errors are raised where the bytes are taken; bytes that could not be fetched ahead are first requested
    again. `begin` and `take` are called by one thread.

    Args:
        fetch: Returns the bytes of a request, or None if the caller has to find out why there are none; called by
            several threads.
        num_threads: Largest number of calls of `fetch` at the same time.
        max_bytes: Limit for the bytes that are held or requested; the current microbatch may exceed it.
    """

    waited_s: float = 0.0
    """Seconds for which `take` has waited for bytes."""

    def __init__(self, fetch: Fetch, *, num_threads: int, max_bytes: int) -> None:
        self._fetch = fetch
        self._num_threads = num_threads
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # A condition would do as well, but it is written in Python, and takes longer than all the rest of this class.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._entries: dict[Request, _Entry] = {}
        self._queue: deque[Request] = deque()
        self._later: deque[Request] = deque()
        """What is not requested yet, because of the limit."""

        self._uses: Counter[Request] = Counter()
        self._current: frozenset[Request] = frozenset()
        self._held_bytes = 0
        self._threads: list[threading.Thread] = []
        self._num_idle = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are held or requested."""
        return self._held_bytes

    def begin(self, current: Sequence[Request], upcoming: Iterable[Sequence[Request]]) -> None:
        """Begins a microbatch.

        Args:
            current: What is taken now, each request as often as it is taken.
            upcoming: The same for the next microbatches.
        """
        with self._lock:
            in_order = list(chain(current, *upcoming))
            self._uses = Counter(in_order)
            self._current = frozenset(current)
            for request in [request for request in self._entries if request not in self._uses]:
                self._drop(request)
            wanted = dict.fromkeys(in_order)
            self._later = deque(request for request in wanted if request not in self._entries)
            waiting = set(self._queue)
            self._queue = deque(request for request in wanted if request in waiting)
            self._request_more()

    def take(self, request: Request, on_wait: Callable[[], None] = lambda: None) -> bytes | None:
        """Returns the bytes of a request; waits until they have arrived.

        Args:
            request: A request of the current microbatch, or any other, which is then fetched now.
            on_wait: Called before waiting.

        Raises:
            Exception: What `fetch` raised for this request.
        """
        entry = self._entries.get(request)
        if entry is None or not entry.is_done or entry.error is not None:
            on_wait()
            entry = self._awaited(request, entry)
        with self._lock:
            self._uses[request] -= 1
            if self._uses[request] <= 0:
                self._drop(request)
                self._request_more()
        if entry.error is not None:
            raise entry.error
        return entry.content

    def _awaited(self, request: Request, entry: "_Entry | None") -> "_Entry":
        """Waits for the bytes of a request, or fetches them now if there is no entry or if it has failed before."""
        began = time.monotonic()
        try:
            # Bytes that could not be fetched ahead are requested again, because the store may have recovered since.
            if entry is None or entry.error is not None:
                entry = _Entry()
                entry.content = self._fetch(request)
                return entry
            with self._lock:
                if not entry.is_done:
                    entry.arrived = threading.Event()
            if entry.arrived is not None:
                entry.arrived.wait()
            return entry
        finally:
            self.waited_s += time.monotonic() - began

    def _request_more(self) -> None:
        """Moves requests to the queue, in order, as far as the limit allows."""
        while self._later:
            request = self._later[0]
            if request not in self._current and self._held_bytes + request.length > self._max_bytes:
                return
            self._later.popleft()
            self._entries[request] = _Entry()
            self._held_bytes += request.length
            self._add_to_queue(request)

    def _add_to_queue(self, request: Request) -> None:
        self._queue.append(request)
        if len(self._queue) > self._num_idle and len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._work, name=f"read-ahead-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._wake.put(None)

    def _drop(self, request: Request) -> None:
        if self._entries.pop(request, None) is not None:
            self._held_bytes -= request.length

    def _work(self) -> None:
        """Fetches what is in the queue; ends with the process."""
        while True:
            with self._lock:
                self._num_idle += 1
            self._wake.get()
            with self._lock:
                self._num_idle -= 1
                request = self._queue.popleft() if self._queue else None  # empty: no longer needed
                entry = None if request is None else self._entries.get(request)
            if request is None or entry is None:
                continue
            try:
                entry.content = self._fetch(request)
            except BaseException as error:  # such as a panic of obstore, after which `take` would wait forever
                entry.error = error
            with self._lock:
                entry.is_done = True
            if entry.arrived is not None:
                entry.arrived.set()


class _Entry:
    """The bytes of a request, or the error instead of them."""

    __slots__ = ("arrived", "content", "error", "is_done")

    def __init__(self) -> None:
        self.content: bytes | None = None
        self.error: BaseException | None = None
        self.is_done = False
        self.arrived: threading.Event | None = None
        """Set when the bytes have arrived; only if `take` waits for them."""
