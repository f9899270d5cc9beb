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

CURRENT_BYTES = 256 << 20
"""Limit for the bytes of the current microbatch that are held or requested. One member may exceed it."""


class ReadAhead:
    """Holds the bytes of the microbatch that a process loads, and of those that it loads next, within a limit.

    All bytes of the current microbatch are requested at once, then those of the next ones, in the order in which they
    are needed. If the current microbatch has more bytes than the limit, further ones are requested as others are taken.
    Within the limits, no bytes are requested twice as long as they are needed. Bytes that are no longer needed are
    dropped. Errors are raised where the bytes are taken; bytes that could not be fetched ahead are first requested
    again. `begin` and `take` are called by one thread.

    Args:
        fetch: Returns the bytes of a request, or None if the caller has to find out why there are none; called by
            several threads.
        num_threads: Largest number of calls of `fetch` at the same time.
        max_bytes: Limit for the bytes that are held or requested.
        current_bytes: The same while bytes of the current microbatch are requested, if it is larger.
    """

    waited_s: float = 0.0
    """Seconds for which `take` has waited for bytes."""

    def __init__(self, fetch: Fetch, *, num_threads: int, max_bytes: int, current_bytes: int = CURRENT_BYTES) -> None:
        self._fetch = fetch
        self._num_threads = num_threads
        self._max_bytes = max_bytes
        self._current_bytes = max(max_bytes, current_bytes)
        self._lock = threading.Lock()
        # A condition would do as well, but it is written in Python, and takes longer than all the rest of this class.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._entries: dict[Request, _Entry] = {}
        self._queue: deque[Request] = deque()
        self._later: deque[Request] = deque()
        """Further uses, in order, that the limits do not allow yet."""

        self._uses: Counter[Request] = Counter()
        self._current: frozenset[Request] = frozenset()
        self._held_bytes = 0
        self._num_untaken = 0
        """Number of entries that were never taken."""

        self._threads: list[threading.Thread] = []
        self._num_idle = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are held or requested."""
        return self._held_bytes

    def begin(self, current: Sequence[Request], upcoming: Iterable[Sequence[Request]]) -> None:
        """Begins a microbatch.

        Args:
            current: Requests of this microbatch, each as often as it is taken.
            upcoming: The same for the next microbatches.
        """
        with self._lock:
            in_order = list(chain(current, *upcoming))
            self._uses = Counter(in_order)
            self._current = frozenset(current)
            for request in [request for request in self._entries if request not in self._uses]:
                self._drop(request)
            self._later = deque(in_order)
            waiting = set(self._queue)
            self._queue = deque(request for request in self._uses if request in waiting)
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
            if (held := self._entries.get(request)) is not None:
                self._note_taken(held)
            # Bytes that exceed the limit are requested again for their next use.
            if self._uses[request] <= 0 or self._held_bytes > self._current_bytes:
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
            if request not in self._entries and self._uses[request] > 0:
                if not self._has_room(request):
                    return
                self._entries[request] = _Entry()
                self._num_untaken += 1
                self._held_bytes += request.length
                self._add_to_queue(request)
            self._later.popleft()

    def _has_room(self, request: Request) -> bool:
        num_bytes = self._held_bytes + request.length
        if request not in self._current:
            return num_bytes <= self._max_bytes
        # A member of any length is requested while its predecessor is decoded.
        return num_bytes <= self._current_bytes or not self._num_untaken

    def _note_taken(self, entry: "_Entry") -> None:
        if not entry.is_taken:
            entry.is_taken = True
            self._num_untaken -= 1

    def _add_to_queue(self, request: Request) -> None:
        self._queue.append(request)
        if len(self._queue) > self._num_idle and len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._work, name=f"read-ahead-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._wake.put(None)

    def _drop(self, request: Request) -> None:
        entry = self._entries.pop(request, None)
        if entry is not None:
            self._note_taken(entry)
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

    __slots__ = ("arrived", "content", "error", "is_done", "is_taken")

    def __init__(self) -> None:
        self.content: bytes | None = None
        self.error: BaseException | None = None
        self.is_done = False
        self.is_taken = False
        self.arrived: threading.Event | None = None
        """Set when the bytes have arrived; only if `take` waits for them."""
