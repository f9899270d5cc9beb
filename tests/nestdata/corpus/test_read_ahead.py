import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nestdata.corpus.addresses import Address
from nestdata.corpus.read_ahead import ReadAhead, Request
from nestdata.errors import StorageError

PATIENCE_S = 60.0


def request(number: int, length: int = 10) -> Request:
    return Request(Address("s3://bucket/shard.tar", 1000 * number, length, 10**6, None, None))


def number_of(wanted: Request) -> int:
    return wanted.address.offset // 1000


class Store:
    """Answers requests when the test allows it, and records them in the order of their arrival."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.open = True
        self._changed = threading.Condition()

    def fetch(self, wanted: Request) -> bytes:
        with self._changed:
            self.asked.append(number_of(wanted))
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.open, PATIENCE_S)
        return bytes([number_of(wanted)]) * wanted.length

    def wait_for(self, *numbers: int) -> None:
        """Waits until exactly these requests have arrived, in any order."""
        with self._changed:
            assert self._changed.wait_for(lambda: sorted(self.asked) == sorted(numbers), PATIENCE_S), self.asked

    def release(self) -> None:
        with self._changed:
            self.open = True
            self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Leaves all requests without an answer."""
        self.open = False
        try:
            yield
        finally:
            self.release()


def reader(store: Store, *, num_threads: int = 4, max_bytes: int = 1000) -> ReadAhead:
    return ReadAhead(store.fetch, num_threads=num_threads, max_bytes=max_bytes)


def test_all_bytes_of_a_microbatch_are_requested_at_once_and_then_those_of_the_next_ones() -> None:
    store = Store()
    ahead = reader(store, num_threads=6)
    with store.closed():
        ahead.begin([request(1), request(2)], [[request(3), request(4)], [request(5)]])
        store.wait_for(1, 2, 3, 4, 5)  # none was answered
    assert [ahead.take(request(number)) for number in (1, 2)] == [b"\1" * 10, b"\2" * 10]


def test_nothing_is_requested_twice_while_it_is_needed() -> None:
    store = Store()
    ahead = reader(store)
    shared = request(1)  # two windows of one member, and a third one in the next microbatch
    ahead.begin([shared, request(2), shared], [[shared, request(3)]])
    for wanted in (shared, request(2), shared):
        assert ahead.take(wanted) == bytes([number_of(wanted)]) * 10
    ahead.begin([shared, request(3)], [[request(4)]])
    for wanted in (shared, request(3)):
        ahead.take(wanted)
    ahead.begin([request(4)], [])
    ahead.take(request(4))
    assert sorted(store.asked) == [1, 2, 3, 4]
    assert ahead.held_bytes == 0


def test_bytes_that_are_held_or_requested_stay_within_the_limit() -> None:
    store = Store()
    ahead = reader(store, num_threads=8, max_bytes=35)
    ahead.begin([request(1), request(2)], [[request(3)], [request(4)], [request(5)]])
    store.wait_for(1, 2, 3)
    assert ahead.held_bytes == 30
    ahead.take(request(1))
    store.wait_for(1, 2, 3, 4)  # the bytes that were taken make room
    ahead.take(request(2))
    store.wait_for(1, 2, 3, 4, 5)
    assert ahead.held_bytes == 30


def test_members_above_the_limit_are_fetched_one_by_one_each_while_the_last_one_is_used() -> None:
    store = Store()
    ahead = reader(store, max_bytes=50)
    members = [request(number, 100) for number in range(4)]
    ahead.begin(members, [])
    for number, member in enumerate(members):
        store.wait_for(*range(number + 1))
        assert ahead.held_bytes == 100
        assert ahead.take(member) == bytes([number]) * 100
    assert ahead.held_bytes == 0


def test_what_is_no_longer_needed_is_dropped_and_not_requested() -> None:
    store = Store()
    ahead = reader(store, num_threads=1)
    with store.closed():
        ahead.begin([request(1)], [[request(2)], [request(3)]])
        store.wait_for(1)
        ahead.begin([request(4)], [[request(3)]])  # as after a change of plans
        assert ahead.held_bytes == 20
    assert ahead.take(request(4)) == b"\4" * 10
    store.wait_for(1, 4, 3)


def test_an_error_is_raised_where_its_bytes_are_taken() -> None:
    def fail(wanted: Request) -> bytes:
        if number_of(wanted) == 2:
            raise StorageError.because("unavailable", "s3://bucket/shard.tar: status 503, after 40 tries in 300 s.")
        return b"fine"

    ahead = ReadAhead(fail, num_threads=2, max_bytes=1000)
    ahead.begin([request(1)], [[request(2)]])
    assert ahead.take(request(1)) == b"fine"
    ahead.begin([request(2)], [])
    with pytest.raises(StorageError, match="after 40 tries in 300 s"):
        ahead.take(request(2))


def test_bytes_that_could_not_be_fetched_ahead_are_requested_again_when_they_are_needed() -> None:
    store = Store()
    is_down = threading.Event()
    is_down.set()

    def fetch(wanted: Request) -> bytes:
        content = store.fetch(wanted)
        if number_of(wanted) == 2 and is_down.is_set():
            raise StorageError.because("unavailable", "s3://bucket/shard.tar: connection refused.")
        return content

    ahead = ReadAhead(fetch, num_threads=1, max_bytes=1000)
    ahead.begin([request(1)], [[request(2)], [request(3)]])
    store.wait_for(1, 2, 3)
    is_down.clear()
    ahead.begin([request(2)], [[request(3)]])
    assert ahead.take(request(2)) == b"\2" * 10
    assert ahead.take(request(3)) == b"\3" * 10
    assert ahead.held_bytes == 0
