import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import socket
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


def used(directory: Path) -> int:
    return int((directory / "used").read_bytes())


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("???/*"))


def test_what_was_put_is_returned_in_every_process(tmp_path: Path) -> None:
    PinnedCache(tmp_path / "cache", 10_000).put(address(1), content(1))
    other = PinnedCache(tmp_path / "cache", 10_000)
    assert other.get(address(1)) == content(1)
    assert other.get(address(2)) is None
    assert (len(files(tmp_path / "cache")), used(tmp_path / "cache")) == (1, 1000)


@pytest.mark.parametrize(
    "changed", [{"etag": "other"}, {"shard_size": 5}, {"location": "s3://bucket/b.tar"}, {"offset": 1}, {"length": 999}]
)
def test_a_changed_object_or_another_range_is_not_in_the_cache(tmp_path: Path, changed: dict[str, object]) -> None:
    cache = PinnedCache(tmp_path, 10_000)
    cache.put(address(1), content(1))
    assert cache.get(address(1)._replace(**changed)) is None  # type: ignore[arg-type]


def test_nothing_is_added_beyond_the_limit_and_nothing_is_evicted(tmp_path: Path) -> None:
    cache, other = PinnedCache(tmp_path, 3500), PinnedCache(tmp_path, 3500)
    for number in range(6):
        (cache if number % 2 else other).put(address(number), content(number))
        cache.put(address(number), content(number))  # already there, or no room
    assert [cache.get(address(number)) is not None for number in range(6)] == [True] * 3 + [False] * 3
    assert used(tmp_path) == 3000
    assert (cache.failure, other.failure) == ("", "")


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "empty"])
def test_a_damaged_file_is_dropped_and_can_be_written_again(tmp_path: Path, damage: str) -> None:
    cache = PinnedCache(tmp_path, 1000)
    cache.put(address(1), content(1))
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[500] ^= damage == "flip"
    kept = {"truncate": data[:900], "extend": data + b"x", "empty": b""}.get(damage, data)
    path.write_bytes(kept)
    assert cache.get(address(1)) is None
    assert files(tmp_path) == []
    cache.put(address(1), content(1))
    assert cache.get(address(1)) == content(1)


@pytest.mark.parametrize("kind", ["pipe", "link", "socket", "folder", "other"])
def test_what_is_not_a_file_of_this_address_is_neither_waited_for_nor_returned(tmp_path: Path, kind: str) -> None:
    cache = PinnedCache(tmp_path / "cache", 10_000)
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
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):  # a short name, as sockets need
            server.bind(path.name)
    assert cache.get(address(1)) is None
    cache.put(address(1), content(1))
    assert cache.get(address(1)) == (None if kind == "folder" else content(1))
    assert cache.failure == ""


def test_a_file_of_another_user_is_not_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PinnedCache(tmp_path, 10_000)
    cache.put(address(1), content(1))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # only root could change the owner of the file
    assert cache.get(address(1)) is None


def test_a_counter_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    cache = PinnedCache(tmp_path / "cache", 10_000)
    (tmp_path / "cache" / "used").symlink_to(victim)
    cache.put(address(1), content(1))
    assert victim.read_bytes() == b"precious"
    assert "Too many levels of symbolic links" in cache.failure


def test_a_partial_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    cache = PinnedCache(tmp_path / "cache", 10_000)
    name = f"{cache._path(address(1)).name}.1000.{os.getpid()}-{threading.get_ident()}"
    (tmp_path / "cache" / "partial" / name).symlink_to(victim)
    cache.put(address(1), content(1))
    assert (victim.read_bytes(), cache.get(address(1))) == (b"precious", content(1))


def test_a_counter_above_the_limit_is_counted_again(tmp_path: Path) -> None:
    cache = PinnedCache(tmp_path, 3000)
    cache.put(address(1), content(1))
    (tmp_path / "used").write_bytes(b"9" * 32)
    for number in (2, 3, 4):
        cache.put(address(number), content(number))
    assert [cache.get(address(number)) is not None for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert used(tmp_path) == 3000


def test_a_lowered_limit_keeps_the_files_and_takes_no_more(tmp_path: Path) -> None:
    for number in (1, 2):
        PinnedCache(tmp_path, 3000).put(address(number), content(number))
    cache = PinnedCache(tmp_path, 1500)
    for number in (3, 4):
        cache.put(address(number), content(number))
    assert [cache.get(address(number)) is not None for number in (1, 2, 3, 4)] == [True, True, False, False]
    assert used(tmp_path) == 2000


def test_a_stale_name_with_a_huge_length_frees_no_more_than_a_member(tmp_path: Path) -> None:
    PinnedCache(tmp_path, 10**11).put(address(1), content(1))
    (tmp_path / "used").write_bytes(b"%032d" % 10**10)
    stale = tmp_path / "partial" / f"0a3f.{10**30}.12-34"
    stale.write_bytes(b"half")
    os.utime(stale, (time.time() - 4000,) * 2)
    PinnedCache(tmp_path, 10**11)
    assert used(tmp_path) == 10**10 - (2**32 - 1)


def test_bytes_without_the_checksum_of_the_corpus_are_dropped(tmp_path: Path) -> None:
    cache = PinnedCache(tmp_path, 10_000)
    cache.put(address(1), content(1))
    assert cache.get(address(1, crc32=7)) is None
    assert files(tmp_path) == []


def test_a_full_disk_stops_writing_but_not_reading(tmp_path: Path) -> None:
    cache = PinnedCache(tmp_path, 10_000)
    cache.put(address(1), content(1))
    with files_up_to(500):
        cache.put(address(2), content(2))
    assert cache.failure.startswith(f"{tmp_path}: the cache cannot be written (File too large). The run goes on")
    cache.put(address(3), content(3))
    assert [cache.get(address(number)) for number in (1, 2, 3)] == [content(1), None, None]
    assert list((tmp_path / "partial").iterdir()) == []
    assert used(tmp_path) == 1000


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = PinnedCache(tmp_path / "file" / "cache", 10_000)
    assert "Not a directory" in cache.failure
    cache.put(address(1), content(1))
    assert cache.get(address(1)) is None


def write_without_end(directory: str) -> None:
    cache = PinnedCache(Path(directory), 10**12)
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
    cache = PinnedCache(tmp_path, 10**12)
    numbers = [1000 * writer.pid + number for writer in writers for number in range(len(found))]
    held = {number: got for number in numbers if (got := cache.get(address(number, 1_000_000))) is not None}
    assert len(held) == len(found)
    assert all(got == content(number, 1_000_000) for number, got in held.items())
    assert used(tmp_path) >= 1_000_000 * len(found)


def test_partial_files_of_killed_processes_are_removed_after_an_hour(tmp_path: Path) -> None:
    PinnedCache(tmp_path, 10_000).put(address(1), content(1))
    old, new = tmp_path / "partial" / "0a3f.700.12-34", tmp_path / "partial" / "0a40.800.12-35"
    for path in (old, new):
        path.write_bytes(b"half")
    (tmp_path / "used").write_bytes(b"%032d" % (1000 + 700 + 800))
    os.utime(old, (time.time() - 4000,) * 2)
    PinnedCache(tmp_path, 10_000)
    assert (old.exists(), new.exists()) == (False, True)
    assert used(tmp_path) == 1000 + 800  # the room of the removed file is free again


@pytest.mark.parametrize("damaged", [None, b"", bytes(32), b"12x"])
def test_a_counter_that_was_lost_or_damaged_is_counted_again(tmp_path: Path, damaged: bytes | None) -> None:
    for number in (1, 2):
        PinnedCache(tmp_path, 3000).put(address(number), content(number))
    (tmp_path / "used").unlink()
    if damaged is not None:
        (tmp_path / "used").write_bytes(damaged)
    cache = PinnedCache(tmp_path, 3000)
    for number in (3, 4):
        cache.put(address(number), content(number))
    assert [cache.get(address(number)) is not None for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert (used(tmp_path), cache.failure) == (3000, "")


def test_a_folder_that_is_removed_during_a_run_is_filled_again(tmp_path: Path) -> None:
    cache = PinnedCache(tmp_path / "cache", 2000)
    for number in (1, 2):
        cache.put(address(number), content(number))
    shutil.rmtree(tmp_path / "cache")
    for number in (3, 4, 5):
        cache.put(address(number), content(number))  # the first one finds that the folder is gone
    assert [cache.get(address(number)) is not None for number in range(1, 6)] == [False] * 3 + [True] * 2
    assert (used(tmp_path / "cache"), cache.failure) == (2000, "")


def test_a_file_that_cannot_be_looked_at_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    cache = PinnedCache(tmp_path, 10_000)
    monkeypatch.setattr(Path, "stat", refuse)  # as in a folder of another user; root may read those
    cache.put(address(1), content(1))
    assert "Permission denied" in cache.failure


def put_all(directory: str, numbers: range) -> None:
    cache = PinnedCache(Path(directory), 100_000)
    for number in numbers:
        cache.put(address(number), content(number))


@pytest.mark.multiprocess
def test_processes_that_write_at_the_same_time_stay_within_the_limit(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=put_all, args=(str(tmp_path), range(200))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(files(tmp_path)) <= 100
    assert used(tmp_path) <= 100_000
    cache = PinnedCache(tmp_path, 100_000)
    assert sum(cache.get(address(number)) == content(number) for number in range(200)) == len(files(tmp_path))


def test_a_share_is_chosen_by_address_and_grows_without_losing_what_it_had() -> None:
    tenth = {number for number in range(5000) if is_pinned(address(number), 0.1)}
    half = {number for number in range(5000) if is_pinned(address(number), 0.5)}
    assert tenth < half
    assert 430 < len(tenth) < 570  # 500 plus or minus 3.3 standard deviations; the hash has no luck
    assert 2380 < len(half) < 2620
    assert all(is_pinned(address(number), 1.0) for number in range(100))
    assert not any(is_pinned(address(number), 0.0) for number in range(100))
