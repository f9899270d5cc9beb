import contextlib
import errno
import io
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nestdata.errors import ConfigError, StorageError
from nestdata.storage import ObjectInfo, Storage, StorageConfig, clients, patience, storage
from nestdata.storage.failures import Failure
from nestdata.storage.info import StatsCounter
from nestdata.storage.local import OpenFiles

CONTENT = bytes(range(256)) * 40

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's list of descriptors")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "content.bin"
    path.write_bytes(CONTENT)
    return str(path)


def open_files() -> Iterator[str]:
    """Yields the paths of the files that this process has open."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            yield os.readlink(f"/proc/self/fd/{name}")


def num_descriptors(path: str) -> int:
    return sum(name.startswith(path) for name in open_files())


def test_bytes_are_read_by_range_as_a_whole_and_as_a_stream(file: str) -> None:
    store = Storage()
    assert store.info(file) == ObjectInfo(file, len(CONTENT), None)
    assert store.read(file) == CONTENT
    for offset, length in ((0, 1), (100, 5000), (len(CONTENT) - 1, 1), (7, 0)):
        assert store.read_range(file, offset, length, size=len(CONTENT)) == CONTENT[offset : offset + length]
    with store.open_stream(file, offset=10) as stream:
        assert stream.read(5) == CONTENT[10:15]
        stream.seek(-3, io.SEEK_END)
        assert stream.read() == CONTENT[-3:]


@pytest.mark.parametrize(
    ("kind", "message", "action"),
    [
        ("missing", "none: no such file", lambda folder: Storage().read_range(f"{folder}/none", 0, 1)),
        ("missing", "none: no such file", lambda folder: Storage().info(f"{folder}/none")),
        ("missing", "none: no such file", lambda folder: Storage().open_stream(f"{folder}/none")),
        ("missing", "none: no such file", lambda folder: list(Storage().list_objects(f"{folder}/none"))),
        ("missing", "no such file", lambda folder: Storage().info(f"{folder}/content.bin/a")),
        ("invalid", "is a directory, expected a file", lambda folder: Storage().read_range(folder, 0, 1)),
        ("invalid", "is a directory, expected a file", lambda folder: Storage().info(folder)),
        ("invalid", "expected an absolute path or a URL", lambda _: Storage().info("relative")),
        ("invalid", "ftp://host/a: expected an absolute path", lambda _: Storage().read_range("ftp://host/a", 0, 1)),
        (
            "changed",
            "ends at byte 10240, expected",
            lambda folder: Storage().read_range(f"{folder}/content.bin", 1, 10240),
        ),
        (
            "changed",
            "has 10240 bytes, expected 5",
            lambda folder: Storage().read_range(f"{folder}/content.bin", 0, 5, size=5),
        ),
    ],
)
def test_failures_are_one_line_with_their_kind(
    kind: str, message: str, action: Callable[[str], object], file: str
) -> None:
    with pytest.raises(StorageError, match=message) as caught:
        action(os.path.dirname(file))
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


def test_pipes_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for action in (Storage().info, lambda path: Storage().read_range(path, 0, 1)):
        with pytest.raises(StorageError, match="pipe"):
            action(str(tmp_path / "pipe"))


@needs_proc
def test_few_descriptors_are_open_however_many_files_are_read(tmp_path: Path) -> None:
    store = Storage(StorageConfig(max_open_files=4))
    paths = [str(tmp_path / f"{number}.bin") for number in range(20)]
    for number, path in enumerate(paths):
        Path(path).write_bytes(bytes([number]) * 100)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(store.read_range, paths[number % 20], 10, 50) for number in range(400)]
    assert [future.result() for future in futures] == [bytes([number % 20]) * 50 for number in range(400)]
    assert num_descriptors(str(tmp_path)) == 4
    del store
    assert num_descriptors(str(tmp_path)) == 0


@needs_proc
def test_the_files_used_last_stay_open(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())
    files = OpenFiles(2)
    a, b, c = (str(tmp_path / name) for name in "abc")
    for path in (a, b, a, c):
        with files.descriptor(path):
            pass
    links = set(open_files())
    assert {a, c} <= links
    assert b not in links


@needs_proc
def test_a_descriptor_in_use_is_not_closed(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    files = OpenFiles(1)
    with files.descriptor(str(tmp_path / "a")) as first:
        with files.descriptor(str(tmp_path / "b")) as second:
            assert os.pread(first, 1, 0) == b"a"
            assert os.pread(second, 1, 0) == b"b"
    assert num_descriptors(str(tmp_path)) == 1


def test_a_replaced_file_is_read_anew_after_this_process_wrote_it(file: str) -> None:
    store = Storage()
    store.read_range(file, 0, 10)
    store.write(file, b"other bytes")
    assert store.read_range(file, 0, 5, size=11) == b"other"
    store.delete(file)
    with pytest.raises(StorageError, match="no such file"):
        store.read_range(file, 0, 5)


def test_a_file_that_others_replace_or_remove_is_read_anew(tmp_path: Path, file: str) -> None:
    store = Storage()
    store.read_range(file, 0, 10)
    (tmp_path / "new").write_bytes(b"other bytes")
    (tmp_path / "new").replace(file)
    assert store.read_range(file, 0, 5, size=11) == b"other"
    if os.path.isdir("/proc/self/fd"):
        assert num_descriptors(str(tmp_path)) == 1
    os.remove(file)
    with pytest.raises(StorageError, match="no such file"):
        store.read_range(file, 0, 5)


def test_writing_makes_folders_and_leaves_nothing_beside(tmp_path: Path, file: str) -> None:
    store = Storage()
    target = str(tmp_path / "deep/er/name.bin")
    assert store.write(target, b"first") == ObjectInfo(target, 5, None)
    assert store.write(target, Path(file)) == ObjectInfo(target, len(CONTENT), None)
    assert Path(target).read_bytes() == CONTENT
    assert os.listdir(tmp_path / "deep/er") == ["name.bin"]
    store.delete(target)
    store.delete(target)
    assert os.listdir(tmp_path / "deep/er") == []


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, file: str) -> None:
    with pytest.raises(StorageError, match=r"content\.bin: no such file"):
        Storage().write(file, tmp_path / "none")
    assert Path(file).read_bytes() == CONTENT
    assert os.listdir(tmp_path) == ["content.bin"]


def test_files_are_listed_at_any_depth_sorted_by_location(tmp_path: Path) -> None:
    for name in ("b/c.bin", "b.bin", "a/x/y.bin", "b0.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    found = list(Storage().list_objects(str(tmp_path)))
    assert [os.path.relpath(info.location, tmp_path) for info in found] == ["a/x/y.bin", "b.bin", "b/c.bin", "b0.bin"]
    assert [info.size for info in found] == [9, 5, 7, 6]


def test_transient_errors_of_a_file_system_are_repeated(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # No real file system here fails on demand.
    store = Storage()
    failures = [errno.ESTALE, errno.EIO]
    real = os.pread

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        if failures:
            raise OSError(failures.pop(), "not now")
        return real(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert store.read_range(file, 0, 10) == CONTENT[:10]
    assert store.stats.retries == 2


def test_a_file_system_that_keeps_failing_ends_with_counts(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pread(*_: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", pread)
    expected = r"content\.bin: Input/output error, after [2-9] tries in 0 s\. Check the disk"
    for config in (StorageConfig(patience_s=0.4), StorageConfig(local_patience_s=0.4)):
        with pytest.raises(StorageError, match=expected) as caught:
            Storage(config).read_range(file, 0, 10)
        assert caught.value.kind == "unavailable"


def test_an_outage_that_many_requests_meet_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "_WARN_AFTER_S", 0.0)
    monkeypatch.setattr(patience, "_last_warning_s", -patience._WARN_EVERY_S)
    failure = Failure("unavailable", "connection refused", is_transient=True)
    for number in range(3):
        patience.Patience(f"s3://bucket/{number}", StorageConfig(), StatsCounter()).failed(failure)
    assert [record.getMessage() for record in caplog.records] == [
        "s3://bucket/0: connection refused, for 0 s; trying again for up to 300 s"
    ]


def test_too_many_open_files_is_no_missing_file(file: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(StorageError, match="Too many open files") as caught:
            Storage().read_range(file, 0, 1)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.kind == "unavailable"


def test_a_pickle_holds_the_configuration_only(file: str) -> None:
    store = Storage(StorageConfig(patience_s=7.0))
    store.read_range(file, 0, 10)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.config == store.config
    assert copy.stats.requests == 0
    assert copy.read_range(file, 0, 10) == CONTENT[:10]


def test_the_process_has_one_default_storage() -> None:
    assert storage() is storage()
    assert storage().config == StorageConfig()


FORKS = """
import os, sys, threading
from nestdata.storage import Storage

path = sys.argv[1]
store = Storage()
stop = threading.Event()

def read():
    while not stop.is_set():
        store.read_range(path, 0, 100)

threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(50):
    child = os.fork()
    if child == 0:
        os._exit(0 if store.read_range(path, 5, 3) == bytes([5, 6, 7]) else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
"""


def test_files_are_read_in_a_child_that_was_forked_while_locks_were_held(file: str) -> None:
    # In a process of its own: the locks of beartype, which checks types in tests, would be held, too.
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS, file], check=True, timeout=120)


def test_wrong_settings_are_refused() -> None:
    for settings in ({"patience_s": -1.0}, {"max_requests": 0}, {"stall_timeout_s": 0.0}, {"max_open_files": 0}):
        with pytest.raises(ConfigError, match=f"storage.{next(iter(settings))}"):
            StorageConfig(**settings)  # type: ignore[arg-type]


def test_a_damaged_file_that_is_restored_is_opened_anew(file: str, tmp_path: Path) -> None:
    store = Storage()
    store.read_range(file, 0, 5, size=len(CONTENT))
    os.truncate(file, 100)
    with pytest.raises(StorageError, match="has 100 bytes, expected 10240"):
        store.read_range(file, 0, 5, size=len(CONTENT))
    (tmp_path / "restored").write_bytes(CONTENT)
    (tmp_path / "restored").replace(file)
    assert store.read_range(file, 0, 5, size=len(CONTENT)) == CONTENT[:5]


def test_a_child_that_is_forked_during_the_first_request_to_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_is_used", False)
    monkeypatch.setattr(clients, "_was_forked_after_use", False)
    clients.check_not_forked("s3://bucket/a")  # begins every request
    clients._after_fork_in_child()  # another thread forks; there is no client yet
    with pytest.raises(StorageError, match="s3://bucket/a: this process was forked after its parent had used"):
        clients.check_not_forked("s3://bucket/a")
