"""`Storage` against a real S3 server: what it reads, writes, lists and deletes."""

import io
import random
from pathlib import Path

import pytest

from nestdata.errors import StorageError
from nestdata.storage import Storage, StorageConfig

CONTENT = random.Random(1).randbytes(3_500_000)
SMALL_PARTS = StorageConfig(part_bytes=1_000_000, parts_ahead=2)

pytestmark = pytest.mark.usefixtures("access")


@pytest.fixture(scope="module")
def folder() -> str:
    return "s3://speech/test_s3"


def test_what_is_written_is_read_back(folder: str, tmp_path: Path) -> None:
    storage = Storage(StorageConfig(part_bytes=5 << 20))
    large = random.Random(2).randbytes(11 << 20)  # three parts of an upload
    (tmp_path / "large.bin").write_bytes(large)
    for name, source, content in (
        ("empty", b"", b""),
        ("deep/er/small.bin", b"abc", b"abc"),
        ("name with ünusual%20 letters+#.bin", b"xyz", b"xyz"),
        ("large.bin", tmp_path / "large.bin", large),
    ):
        info = storage.write(f"{folder}/{name}", source)
        assert info == storage.info(f"{folder}/{name}")
        assert info[:2] == (f"{folder}/{name}", len(content))
        assert storage.read(f"{folder}/{name}") == content


def test_ranges_have_the_bytes_and_the_length_that_were_asked_for(folder: str) -> None:
    storage = Storage()
    info = storage.write(f"{folder}/ranges.bin", CONTENT)
    size = len(CONTENT)
    for offset, length in ((0, 1), (1000, 200_000), (size - 1, 1), (0, size), (5, 0)):
        found = storage.read_range(info.location, offset, length, etag=info.etag, size=info.size)
        assert found == CONTENT[offset : offset + length]
    for offset, length in ((size, 1), (size - 5, 6), (size + 100, 10)):
        with pytest.raises(StorageError, match=r"ranges\.bin: .*(shorter|or more)") as caught:
            storage.read_range(info.location, offset, length)
        assert caught.value.kind == "changed"


def test_another_version_is_an_error(folder: str) -> None:
    storage = Storage()
    old = storage.write(f"{folder}/version.bin", b"first")
    new = storage.write(f"{folder}/version.bin", b"other")
    longer = storage.write(f"{folder}/longer.bin", b"longer than before")
    assert old.etag != new.etag
    for location, expected, message in (
        (new.location, {"etag": old.etag}, f"has ETag {new.etag}, expected {old.etag}"),
        (longer.location, {"size": 5}, "has 18 bytes, expected 5"),
    ):
        with pytest.raises(StorageError, match=message) as caught:
            storage.read_range(location, 0, 3, **expected)  # type: ignore[arg-type]
        assert caught.value.kind == "changed"
    assert storage.read_range(new.location, 0, 3, etag=f'W/"{new.etag}"') == b"oth"


def test_streams_read_from_any_offset_and_seek(folder: str) -> None:
    storage = Storage(SMALL_PARTS)
    location = storage.write(f"{folder}/stream.bin", CONTENT).location
    with storage.open_stream(location, offset=999_990) as stream:
        assert stream.tell() == 999_990
        assert stream.read(20) == CONTENT[999_990:1_000_010]
        stream.seek(2_500_000)
        assert stream.read(100) == CONTENT[2_500_000:2_500_100]
        stream.seek(-5, io.SEEK_END)
        assert stream.read() == CONTENT[-5:]
        stream.seek(3)
        assert stream.read() == CONTENT[3:]
        assert stream.read() == b""


def test_a_stream_does_not_mix_versions(folder: str) -> None:
    storage = Storage(StorageConfig(part_bytes=100_000, parts_ahead=0))
    location = storage.write(f"{folder}/mixed.bin", CONTENT).location
    with storage.open_stream(location) as stream:
        stream.read(1000)
        storage.write(location, CONTENT[::-1])
        with pytest.raises(StorageError, match=r"mixed\.bin: has ETag") as caught:
            stream.read()
    assert caught.value.kind == "changed"


def test_objects_are_listed_at_any_depth_sorted_by_location() -> None:
    storage = Storage()
    names = ["b/c.bin", "b.bin", "a/x/y.bin", "b0.bin"]
    infos = {name: storage.write(f"s3://speech/listed/{name}", name.encode()) for name in names}
    storage.write("s3://speech/listed-other/a.bin", b"1")  # another folder whose name begins alike
    expected = [infos[name] for name in sorted(names)]
    assert list(storage.list_objects("s3://speech/listed")) == expected
    assert list(storage.list_objects("s3://speech/listed/")) == expected
    assert list(storage.list_objects("s3://speech/listed/a")) == [infos["a/x/y.bin"]]
    assert list(storage.list_objects("s3://speech/nothing")) == []


def test_what_is_deleted_is_missing_and_may_be_deleted_again(folder: str) -> None:
    storage = Storage()
    location = storage.write(f"{folder}/deleted.bin", b"1").location
    storage.delete(location)
    storage.delete(location)
    with pytest.raises(StorageError, match=r"deleted\.bin: no such object") as caught:
        storage.info(location)
    assert caught.value.kind == "missing"
