"""Fetches the bytes of members ahead of their use, so that a process does not wait for each request to a store."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from nestdata.corpus.addresses import Address
from nestdata.corpus.corpora import Corpora
from nestdata.corpus.members import fetch

_THREADS = 16
# Most bytes that are fetched ahead. One member is always fetched, however long it is.
_AHEAD_BYTES = 256 << 20


def fetched_members(corpora: Corpora, indices: Iterable[int]) -> Iterator[Callable[[], bytes | None]]:
    """Yields, for each cut, a function that returns the bytes of its audio file.

    The function returns None for a cut that is read from a file of its own or from a sample bank. It raises AudioError
    if the bytes cannot be used, and StorageError if the store does not answer.
    """
    found = ((index, None if corpora.has_bank(index) else corpora.address(index)) for index in indices)
    if not corpora.is_remote:
        for index, address in found:
            yield partial(_fetch, corpora, index, address)
        return
    with ThreadPoolExecutor(_THREADS) as threads:
        waiting: deque[tuple[Future[bytes | None], int]] = deque()
        ahead = 0
        try:
            for index, address in found:
                length = 0 if address is None else address.length
                while waiting and ahead + length > _AHEAD_BYTES:
                    future, done = waiting.popleft()
                    ahead -= done
                    yield future.result
                waiting.append((threads.submit(_fetch, corpora, index, address), length))
                ahead += length
            while waiting:
                yield waiting.popleft()[0].result
        finally:
            for future, _ in waiting:
                future.cancel()


def _fetch(corpora: Corpora, index: int, address: Address | None) -> bytes | None:
    return None if address is None else fetch(address, corpora.line(index)["id"])
