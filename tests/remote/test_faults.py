"""`Storage` behind a proxy that injects faults: every byte arrives, or one error says what happened."""

import random
import threading
import time

import pytest

from nestdata.errors import StorageError
from nestdata.storage import Storage, StorageConfig
from tests.remote.conftest import Access
from tests.remote.proxy import FaultProxy

CONTENT = random.Random(1).randbytes(6_000_000)
LOCATION = "s3://speech/test_faults/content.bin"
SHARE = 0.3
QUICK = StorageConfig(part_bytes=500_000, parts_ahead=3, stall_timeout_s=1.0)


@pytest.fixture(autouse=True)
def _through_the_proxy(access: Access, proxy: FaultProxy) -> None:
    access.use(endpoint=proxy.url)
    Storage().write(LOCATION, CONTENT)


@pytest.mark.smoke
@pytest.mark.parametrize("fault", ["unavailable", "throttled", "reset", "short", "stalled"])
def test_transient_faults_are_repeated_until_every_byte_has_arrived(fault: str, proxy: FaultProxy) -> None:
    storage = Storage(QUICK)
    before = proxy.counts().get(fault, 0)
    with proxy.with_faults(**{fault: SHARE}):
        assert storage.read(LOCATION) == CONTENT
        for offset in range(0, 1_000_000, 100_000):
            assert storage.read_range(LOCATION, offset, 90_000) == CONTENT[offset : offset + 90_000]
    assert proxy.counts()[fault] > before


@pytest.mark.parametrize("fault", ["throttled", "reset"])
def test_uploads_and_lists_survive_transient_faults(fault: str, proxy: FaultProxy) -> None:
    storage = Storage()
    folder = f"s3://speech/test_faults/{fault}"  # new names, so that the same requests fail in every run
    before = proxy.counts().get(fault, 0)
    with proxy.with_faults(**{fault: SHARE}):
        written = [storage.write(f"{folder}/large.bin", CONTENT + CONTENT)]  # two parts
        written += [storage.write(f"{folder}/{number}.bin", b"1") for number in range(10)]
        listed = list(storage.list_objects(folder))
    assert written[0].size == 2 * len(CONTENT)
    assert {*listed} == {*written}
    assert proxy.counts()[fault] > before


def test_a_server_that_is_away_for_a_time_is_waited_for(proxy: FaultProxy) -> None:
    storage = Storage(StorageConfig(patience_s=60.0))
    storage.info(LOCATION)
    proxy.set(stopped=True)
    back = threading.Timer(3.0, lambda: proxy.set(stopped=False))
    back.start()
    assert storage.read_range(LOCATION, 5, 1000) == CONTENT[5:1005]
    back.join()


def test_a_server_that_stays_away_is_one_error_with_its_url(proxy: FaultProxy) -> None:
    storage = Storage(StorageConfig(patience_s=2.0))
    storage.info(LOCATION)
    with proxy.with_faults(stopped=True):
        for action in (
            lambda: storage.read_range(LOCATION, 0, 10),
            lambda: storage.info(LOCATION),
            lambda: storage.write(LOCATION + "2", b"1"),
            lambda: list(storage.list_objects("s3://speech")),
        ):
            with pytest.raises(StorageError, match=r"^s3://speech.*, after \d+ retries, .*\. Check") as caught:
                action()
            assert caught.value.kind == "unavailable"
            assert "\n" not in str(caught.value)


def test_a_stalled_body_is_given_up_after_the_time_limit(proxy: FaultProxy) -> None:
    storage = Storage(StorageConfig(stall_timeout_s=1.0, patience_s=0.5))
    started = time.monotonic()
    with proxy.with_faults(stalled=1.0):
        with pytest.raises(StorageError, match="request or response body error") as caught:
            storage.read_range(LOCATION, 0, 10_000)
    assert caught.value.kind == "unavailable"
    assert time.monotonic() - started < 60  # the proxy would hold the connection for ten minutes


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(access: Access, proxy: FaultProxy) -> None:
    location = LOCATION + "replaced"
    info = Storage().write(location, CONTENT)
    proxy.set(short=1.0)  # every answer breaks off in its middle
    before = proxy.counts().get("short", 0)
    found: list[StorageError] = []

    def read() -> None:
        try:
            Storage().read_range(location, 0, len(CONTENT), etag=info.etag, size=info.size)
        except StorageError as error:
            found.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while proxy.counts().get("short", 0) == before:
        time.sleep(0.01)
    proxy.set(short=0.0, unavailable=1.0)
    access.use()  # directly, while the reader gets no answer
    Storage().write(location, CONTENT[::-1])
    proxy.set(unavailable=0.0)
    reader.join(60)
    assert [error.kind for error in found] == ["changed"]
    assert "has ETag" in str(found[0])
