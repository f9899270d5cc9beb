import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from nestdata.errors import StorageError
from nestdata.storage import FileVersion, ObjectInfo, Storage, StorageConfig, clients

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "content.bin"
    path.write_bytes(CONTENT)
    return str(path)


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
        ("missing", "none: no such file", lambda folder: list(Storage().list_objects(f"{folder}/none"))),
        ("invalid", "a folder, expected a file", lambda folder: Storage().read_range(folder, 0, 1)),
        ("invalid", "expected an absolute path or a URL", lambda _: Storage().info("relative")),
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


def test_a_file_that_others_replace_or_remove_is_read_anew(tmp_path: Path, file: str) -> None:
    store = Storage()
    store.read_range(file, 0, 10)
    (tmp_path / "new").write_bytes(b"other bytes")
    (tmp_path / "new").replace(file)
    assert store.read_range(file, 0, 5, size=11) == b"other"
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


def test_a_pickle_holds_the_configuration_only(file: str) -> None:
    store = Storage(StorageConfig(patience_s=7.0))
    store.read_range(file, 0, 10)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.config == store.config
    assert (store.stats.bytes_read, copy.stats.bytes_read) == (10, 0)
    assert copy.read_range(file, 0, 10) == CONTENT[:10]


def test_a_child_that_is_forked_during_the_first_request_to_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_is_used", False)
    monkeypatch.setattr(clients, "_was_forked_after_use", False)
    clients.check_not_forked("s3://bucket/a")  # begins every request
    clients._after_fork_in_child()  # another thread forks; there is no client yet
    with pytest.raises(StorageError, match="s3://bucket/a: this process was forked after its parent had used"):
        clients.check_not_forked("s3://bucket/a")


def test_a_time_that_64_bits_cannot_hold_is_the_last_one_that_they_can(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch()
    os.utime(tmp_path / "a.wav", ns=(0, 2**63 + 10**9))
    version = FileVersion.of((tmp_path / "a.wav").stat())
    assert version == (2**63 - 1, 0)
