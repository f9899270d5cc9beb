"""Latency and bandwidth of an object store, measured on random members of the corpora of a run."""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata import Address, Corpora, Storage, is_url

AT_ONCE = 32
"""Number of requests in flight in the measurement of the bandwidth."""

_FEWEST_REQUESTS = 5
"""Requests of a measurement, however long they take."""

_MOST_TRIES = 1000
"""Random cuts without one in a store after which those in a store are looked up, which takes longer."""


class RemoteMember(NamedTuple):
    """A cut whose bytes are in an object store."""

    address: Address
    audio_s: float
    """Duration of the cut in seconds, which may be a part of its member."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRate:
    """Requests for random members, with a given number of them in flight."""

    median_s: float
    """Time of a request, its data included, in seconds."""

    p95_s: float
    """Time within which 95 % of the requests are complete, in seconds."""

    requests_per_s: float
    bytes_per_s: float
    audio_s_per_s: float
    """Seconds of audio that the requests deliver in a second."""


def remote_members(corpora: Corpora, seed: int) -> Iterator[RemoteMember]:
    """Yields random cuts that are read from an object store, without an end; none if there are none."""
    rng = random.Random(seed)
    num_misses = 0
    while num_misses < _MOST_TRIES:
        member = remote_member(corpora, rng.randrange(len(corpora)))
        num_misses = 0 if member is not None else num_misses + 1
        if member is not None:
            yield member
    indices = _remote_indices(corpora)
    while len(indices):
        member = remote_member(corpora, int(indices[rng.randrange(len(indices))]))
        assert member is not None
        yield member


def _remote_indices(corpora: Corpora) -> NDArray[np.int64]:
    """Returns the indices of all cuts that are read from an object store."""
    found, first = [np.empty(0, np.int64)], 0
    for corpus in corpora.corpora:
        if corpus.is_remote:
            remote = [number for number, shard in enumerate(corpus.shards()) if is_url(shard.info.location)]
            found.append(first + np.flatnonzero(np.isin(corpus.shard_numbers(), remote)))
        first += len(corpus)
    return np.concatenate(found)


def remote_member(corpora: Corpora, index: int) -> RemoteMember | None:
    """Returns the address of a cut and its duration; None if the cut is read from a file or a sample bank."""
    address = None if corpora.has_bank(index) else corpora.address(index)
    if address is None or not is_url(address.location):
        return None
    return RemoteMember(address, corpora.num_samples_of(index) / corpora.sampling_rate)


def measure_requests(members: Iterator[RemoteMember], storage: Storage, at_once: int, measure_s: float) -> RequestRate:
    """Reads members for a given time.

    Args:
        members: The members to read, without an end.
        storage: The storage; its connections may be new, because the first requests are not counted.
        at_once: Number of requests in flight.
        measure_s: Duration of the measurement in seconds.

    Raises:
        StorageError: A member cannot be read.
    """
    lock = Lock()

    def fetch(until: Callable[[int], bool]) -> list[tuple[float, RemoteMember]]:
        fetched: list[tuple[float, RemoteMember]] = []
        while not until(len(fetched)):
            with lock:
                member = next(members)
            before = time.perf_counter()
            address = member.address
            storage.read_range(
                address.location, address.offset, address.length, etag=address.etag, size=address.shard_size
            )
            fetched.append((time.perf_counter() - before, member))
        return fetched

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(fetch, [lambda number: number >= 1] * at_once))  # sets up connections
        started = time.perf_counter()
        fewest = -(-_FEWEST_REQUESTS // at_once)

        def is_over(number: int) -> bool:
            return number >= fewest and time.perf_counter() - started >= measure_s

        fetched = [each for thread in pool.map(fetch, [is_over] * at_once) for each in thread]
        seconds = time.perf_counter() - started
    times = [each for each, _ in fetched]
    return RequestRate(
        median_s=statistics.median(times),
        p95_s=statistics.quantiles(times, n=20)[-1],
        requests_per_s=len(fetched) / seconds,
        bytes_per_s=sum(member.address.length for _, member in fetched) / seconds,
        audio_s_per_s=sum(member.audio_s for _, member in fetched) / seconds,
    )
