import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from nestdata.corpus.addresses import Address
from nestdata.corpus.cache import PinnedCache, is_pinned
from tests.nestdata.full_disk import files_up_to

REPOSITORY = Path(__file__).parents[3]
PATIENCE_S = 60.0


def address(number: int, length: int = 1000, crc32: int | None = None) -> Address:
    return Address("s3://bucket/shard.tar", 2000 * number, length, 10**9, "etag", crc32)


def content(number: int, length: int = 1000) -> bytes:
    return np.random.default_rng(number).bytes(length)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("???/*"))


def test_what_was_put_is_returned_in_every_process(tmp_path: Path) -> None:
    PinnedCache(tmp_path / "cache").put(address(1), content(1))
    other = PinnedCache(tmp_path / "cache")
    assert other.get(address(1)) == content(1)
    assert other.get(address(2)) is None
    assert len(files(tmp_path / "cache")) == 1


@pytest.mark.parametrize(
    "changed", [{"etag": "other"}, {"shard_size": 5}, {"location": "s3://bucket/b.tar"}, {"offset": 1}, {"length": 999}]
)
def test_a_changed_object_or_another_range_is_not_in_the_cache(tmp_path: Path, changed: dict[str, object]) -> None:
    cache = PinnedCache(tmp_path)
    cache.put(address(1), content(1))
    assert cache.get(address(1)._replace(**changed)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_file_is_dropped_and_can_be_written_again(tmp_path: Path, damage: str) -> None:
    cache = PinnedCache(tmp_path)
    cache.put(address(1), content(1))
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[500] ^= damage == "flip"
    kept = {"truncate": data[:900], "empty": b""}.get(damage, data)
    path.write_bytes(kept)
    assert cache.get(address(1)) is None
    assert files(tmp_path) == []
    cache.put(address(1), content(1))
    assert cache.get(address(1)) == content(1)


@pytest.mark.parametrize("kind", ["pipe", "link", "other"])
def test_what_is_not_a_file_of_this_address_is_neither_waited_for_nor_returned(tmp_path: Path, kind: str) -> None:
    cache = PinnedCache(tmp_path / "cache")
    for number in (1, 2):
        cache.put(address(number), content(number))
    path = cache._path(address(1))
    whole = path.read_bytes()
    if kind == "other":  # intact, and of the same length
        path.write_bytes(cache._path(address(2)).read_bytes())
    else:
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "target").write_bytes(whole)
        path.symlink_to(tmp_path / "target")
    assert cache.get(address(1)) is None
    cache.put(address(1), content(1))
    assert cache.get(address(1)) == content(1)
    assert cache.failure == ""


def test_a_file_of_another_user_is_not_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PinnedCache(tmp_path)
    cache.put(address(1), content(1))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # only root could change the owner of the file
    assert cache.get(address(1)) is None


def test_a_partial_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    cache = PinnedCache(tmp_path / "cache")
    name = f"{cache._path(address(1)).name}.{os.getpid()}-{threading.get_ident()}"
    (tmp_path / "cache" / "partial" / name).symlink_to(victim)
    cache.put(address(1), content(1))
    assert (victim.read_bytes(), cache.get(address(1))) == (b"precious", content(1))


def test_bytes_without_the_checksum_of_the_corpus_are_dropped(tmp_path: Path) -> None:
    cache = PinnedCache(tmp_path)
    cache.put(address(1), content(1))
    assert cache.get(address(1, crc32=7)) is None
    assert files(tmp_path) == []


def test_a_full_disk_stops_writing_but_not_reading(tmp_path: Path) -> None:
    cache = PinnedCache(tmp_path)
    cache.put(address(1), content(1))
    with files_up_to(500):
        cache.put(address(2), content(2))
    assert cache.failure.startswith(f"{tmp_path}: the cache cannot be written (File too large). The run goes on")
    cache.put(address(3), content(3))
    assert [cache.get(address(number)) for number in (1, 2, 3)] == [content(1), None, None]
    assert list((tmp_path / "partial").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = PinnedCache(tmp_path / "file" / "cache")
    assert "Not a directory" in cache.failure
    cache.put(address(1), content(1))
    assert cache.get(address(1)) is None


def write_without_end(directory: str) -> None:
    cache = PinnedCache(Path(directory))
    number = 1000 * os.getpid()
    while True:
        cache.put(address(number, 1_000_000), content(number, 1_000_000))
        number += 1


@pytest.mark.multiprocess
def test_processes_that_are_killed_while_writing_leave_only_complete_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"from {__name__} import *; write_without_end({str(tmp_path)!r})"]
    writers = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(2)]
    deadline = time.monotonic() + PATIENCE_S
    while len(files(tmp_path)) < 20 and time.monotonic() < deadline:
        time.sleep(0.001)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    found = files(tmp_path)
    assert len(found) >= 20
    assert {path.stat().st_size for path in found} == {1_000_004}
    cache = PinnedCache(tmp_path)
    numbers = [1000 * writer.pid + number for writer in writers for number in range(len(found))]
    held = {number: got for number in numbers if (got := cache.get(address(number, 1_000_000))) is not None}
    assert len(held) == len(found)
    assert all(got == content(number, 1_000_000) for number, got in held.items())


def test_partial_files_of_killed_processes_are_removed_after_an_hour(tmp_path: Path) -> None:
    PinnedCache(tmp_path).put(address(1), content(1))
    old, new = (tmp_path / "partial" / f"{name:032x}.12-34" for name in (1, 2))
    of_a_user = tmp_path / "partial" / "thesis.tex"
    for path in (old, new, of_a_user):
        path.write_bytes(b"half")
    for path in (old, of_a_user):
        os.utime(path, (time.time() - 4000,) * 2)
    PinnedCache(tmp_path)
    assert (old.exists(), new.exists(), of_a_user.exists()) == (False, True, True)


def test_a_share_is_chosen_by_address_and_grows_without_losing_what_it_had() -> None:
    tenth = {number for number in range(5000) if is_pinned(address(number), 0.1)}
    half = {number for number in range(5000) if is_pinned(address(number), 0.5)}
    assert tenth < half
    assert 430 < len(tenth) < 570  # 500 plus or minus 3.3 standard deviations; the hash has no luck
    assert 2380 < len(half) < 2620
    assert all(is_pinned(address(number), 1.0) for number in range(100))
    assert not any(is_pinned(address(number), 0.0) for number in range(100))
