import io
import time

import pytest

from nestdata.errors import StorageError
from nestdata.storage import StorageConfig
from nestdata.storage.stream import PartStream

CONTENT = bytes(range(250)) * 4
CONFIG = StorageConfig(part_bytes=100, parts_ahead=2)


def open_content(
    requests: list[tuple[int, int]], *, offset: int = 0, fails_at: int | None = None, config: StorageConfig = CONFIG
) -> PartStream:
    def fetch(start: int, length: int) -> bytes:
        requests.append((start, length))
        if start == fails_at:
            raise StorageError.because("changed", "the object has changed")
        return CONTENT[start : start + length]

    return PartStream(fetch, name="s3://bucket/name", size=len(CONTENT), offset=offset, config=config)


def test_every_byte_is_read_once_in_parts() -> None:
    requests: list[tuple[int, int]] = []
    with open_content(requests, offset=30) as stream:
        assert stream.readall() == CONTENT[30:]
        assert stream.read(5) == b""
    starts = [*range(30, 1000, 100)]
    assert sorted(requests) == [(start, min(100, 1000 - start)) for start in starts]


def test_no_more_parts_than_the_setting_are_requested_ahead() -> None:
    requests: list[tuple[int, int]] = []
    with open_content(requests) as stream:
        assert stream.read(1) == CONTENT[:1]
        deadline = time.monotonic() + 30
        while len(requests) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(requests) == [(0, 100), (100, 100), (200, 100)]


def test_seeking_reads_the_right_bytes() -> None:
    with io.BufferedReader(open_content([]), 16) as stream:
        for position in (990, 0, 150, 149, 999, 500):
            assert stream.seek(position) == position
            assert stream.read(20) == CONTENT[position : position + 20]
        assert stream.seek(0, io.SEEK_END) == 1000
        assert stream.read() == b""


def test_a_failed_part_fails_the_read_that_needs_it() -> None:
    with open_content([], fails_at=200) as stream:
        assert stream.read(200) == CONTENT[:100]
        assert stream.read(100) == CONTENT[100:200]
        with pytest.raises(StorageError, match="has changed"):
            stream.read(1)
