"""`Storage` behind a proxy that injects faults: every byte arrives, or one error says what happened."""

import random
import re
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
    assert storage.stats.retries == proxy.counts()[fault] - before > 0


@pytest.mark.parametrize("fault", ["unavailable", "throttled", "reset"])
def test_uploads_and_lists_survive_transient_faults(fault: str, proxy: FaultProxy) -> None:
    storage = Storage()
    folder = f"s3://speech/test_faults/{fault}"  # new names, so that the same requests fail in every run
    before = proxy.counts().get(fault, 0)
    with proxy.with_faults(**{fault: SHARE}):
        written = [storage.write(f"{folder}/large.bin", CONTENT + CONTENT)]  # two parts
        written += [storage.write(f"{folder}/{number}.bin", b"1") for number in range(10)]
        storage.delete(f"{folder}/0.bin")
        listed = list(storage.list_objects(folder))
    assert written[0].size == 2 * len(CONTENT)
    assert {*listed} == {*written} - {written[1]}
    assert proxy.counts()[fault] > before


def test_a_range_that_broke_off_goes_on_after_the_bytes_that_have_arrived(proxy: FaultProxy) -> None:
    # Every answer breaks off in its middle, so from 6 MB, tries bring 3 MB and 1 MB, and never the last one. Then
    # every answer has one flipped bit, in its middle: it tells where the last request began.
    storage = Storage()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(storage.read_range(LOCATION, 0, len(CONTENT))))
    proxy.set(short=1.0)
    reader.start()
    while storage.stats.retries < 3:
        time.sleep(0.01)
    proxy.set(short=0.0, flipped=1.0)
    reader.join()
    flipped = [index for index, byte in enumerate(found[0]) if byte != CONTENT[index]]
    assert len(flipped) == 1
    assert flipped[0] > 4_500_000  # the middle of what was missing after 3 MB or more


def test_a_server_that_is_away_for_a_time_is_waited_for(proxy: FaultProxy) -> None:
    storage = Storage(StorageConfig(patience_s=60.0))
    storage.info(LOCATION)
    proxy.set(stopped=True)
    back = threading.Timer(3.0, lambda: proxy.set(stopped=False))
    back.start()
    assert storage.read_range(LOCATION, 5, 1000) == CONTENT[5:1005]
    back.join()
    assert storage.stats.retries >= 2


def test_a_server_that_stays_away_is_one_error_with_url_and_counts(proxy: FaultProxy) -> None:
    storage = Storage(StorageConfig(patience_s=2.0))
    storage.info(LOCATION)
    with proxy.with_faults(stopped=True):
        for action in (
            lambda: storage.read_range(LOCATION, 0, 10),
            lambda: storage.info(LOCATION),
            lambda: storage.write(LOCATION + "2", b"1"),
            lambda: list(storage.list_objects("s3://speech")),
        ):
            with pytest.raises(StorageError, match=r"^s3://speech.*, after \d+ tries in \d+ s\. Check") as caught:
                action()
            assert caught.value.kind == "unavailable"
            assert "\n" not in str(caught.value)


def test_all_requests_failing_ends_with_the_last_status(proxy: FaultProxy) -> None:
    with proxy.with_faults(throttled=1.0):
        with pytest.raises(StorageError, match=re.escape("HTTP 429 SlowDown, after")):
            Storage(StorageConfig(patience_s=1.0)).read_range(LOCATION, 0, 10)


def test_a_stalled_body_is_given_up_after_the_time_limit(proxy: FaultProxy) -> None:
    storage = Storage(StorageConfig(stall_timeout_s=1.0, patience_s=0.5))
    started = time.monotonic()
    with proxy.with_faults(stalled=1.0):
        with pytest.raises(StorageError, match="no answer within the time limit"):
            storage.read_range(LOCATION, 0, 10_000)
    assert time.monotonic() - started < 60  # the proxy would hold the connection for ten minutes


def test_a_flipped_byte_is_not_noticed_here(proxy: FaultProxy) -> None:
    # Checksums of members are compared where they are known: in nestdata.corpus.
    with proxy.with_faults(flipped=1.0):
        found = Storage().read_range(LOCATION, 0, 1000)
    assert [index for index in range(1000) if found[index] != CONTENT[index]] == [500]


def test_closing_a_stream_ends_its_requests(proxy: FaultProxy) -> None:
    storage = Storage(QUICK)
    stream = storage.open_stream(LOCATION)
    stream.read(10)
    proxy.set(stopped=True)
    stream.close()
    proxy.set(stopped=False)
    deadline = time.monotonic() + 30
    while any(thread.name.startswith("nestdata-stream") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_range_that_goes_on_does_not_mix_versions(access: Access, proxy: FaultProxy) -> None:
    storage = Storage()
    location = LOCATION + "replaced"
    storage.write(location, CONTENT)
    proxy.set(short=1.0)
    found: list[str] = []

    def read() -> None:
        try:
            storage.read_range(location, 0, len(CONTENT))
        except StorageError as error:
            found.append(str(error))

    reader = threading.Thread(target=read)
    before = storage.stats.retries
    reader.start()
    while storage.stats.retries == before:
        time.sleep(0.01)
    proxy.set(short=0.0, unavailable=1.0)
    access.use()  # directly, while the reader gets no answer
    Storage().write(location, CONTENT[::-1])
    proxy.set(unavailable=0.0)
    reader.join(60)
    assert len(found) == 1
    assert "has ETag" in found[0]
