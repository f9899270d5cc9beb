"""Processes that read from a store in every start method, before and after their parent has: bytes or one error."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from nestdata.errors import StorageError
from nestdata.storage import Storage, StorageConfig
from tests.remote.conftest import Access
from tests.remote.server import S3Server

LOCATION = "s3://speech/test_hang/content.bin"
CONTENT = b"0123456789"
LIMIT_S = 60


def read_in_child(storage: Storage, results: Connection) -> None:
    """Sends what a child reads with its parent's object, and with one of its own."""
    for reader in (storage, Storage()):
        try:
            results.send(reader.read_range(LOCATION, 2, 4))
        except StorageError as error:
            results.send(str(error))


def read_in_parent_and_child(method: str, parent_reads: bool, results: Connection) -> None:
    """Starts a child by a method, from a process that has or has not used the store."""
    storage = Storage(StorageConfig())
    if parent_reads:
        assert storage.read_range(LOCATION, 0, 10) == CONTENT
    child = multiprocessing.get_context(method).Process(target=read_in_child, args=(storage, results))
    child.start()
    child.join()


@pytest.fixture(scope="module", autouse=True)
def _content(s3: S3Server) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Access(monkeypatch, s3).use()
        Storage().write(LOCATION, CONTENT)
        yield


@pytest.mark.parametrize(
    ("method", "parent_reads"), [("fork", False), ("fork", True), ("forkserver", True), ("spawn", True)]
)
@pytest.mark.usefixtures("access")
def test_a_child_reads_or_raises_but_never_hangs(method: str, parent_reads: bool) -> None:
    # The parent is a process of its own, because this one has used a store already.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    parent = context.Process(target=read_in_parent_and_child, args=(method, parent_reads, sender))
    parent.start()
    sender.close()
    found = []
    try:
        for _ in range(2):
            assert receiver.poll(LIMIT_S), "the child hangs"
            found.append(receiver.recv())
        parent.join(LIMIT_S)
    finally:
        parent.kill()
    if method == "fork" and parent_reads:
        for text in found:
            assert text.startswith(f"{LOCATION}: this process was forked after its parent had used an object store")
            assert "forkserver" in text
    else:
        assert found == [b"2345", b"2345"]
    assert parent.exitcode == 0
