import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nestdata import CorpusError
from nestdata.output import check_target, move_into_place, partial_directory


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "speech.corpus"


def fill(directory: Path, content: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "meta.json").write_text(content)
    (directory / "audio").mkdir()
    (directory / "audio" / "0.wav").write_text(content)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_free_target_is_fine(output: Path) -> None:
    for overwrite in (False, True):
        check_target(output, overwrite)


def test_a_corpus_may_be_replaced_on_request_alone(output: Path) -> None:
    fill(output, "old")
    with pytest.raises(CorpusError, match=r"speech\.corpus: exists already\. .*--overwrite"):
        check_target(output, overwrite=False)
    check_target(output, overwrite=True)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_what_is_no_corpus_may_not_be_replaced(output: Path, make: Callable[[Path], None]) -> None:
    make(output)
    for overwrite in (False, True):
        with pytest.raises(CorpusError, match=r"speech\.corpus: exists already\. Choose another place"):
            check_target(output, overwrite)


def test_a_finished_directory_takes_the_name_of_its_target(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "down" / "speech.corpus"
    with partial_directory(output) as partial:
        assert (names(partial), output.exists()) == ([], False)
        fill(partial, "new")
        move_into_place(partial, output)
    assert names(output.parent) == ["speech.corpus"]
    assert (output / "audio" / "0.wav").read_text() == "new"


def without_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())


def with_swap_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = type("Libc", (), {"renameat2": staticmethod(lambda *_: -1)})
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)


@pytest.mark.parametrize("system", [None, without_swap, with_swap_refused])
def test_an_old_corpus_is_replaced_and_removed(
    output: Path, monkeypatch: pytest.MonkeyPatch, system: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    if system:
        system(monkeypatch)
    fill(output, "old")
    with partial_directory(output) as partial:
        fill(partial, "new")
        assert (output / "meta.json").read_text() == "old"
        move_into_place(partial, output)
    assert names(output.parent) == ["speech.corpus"]
    assert (output / "audio" / "0.wav").read_text() == "new"


def test_an_error_removes_what_was_begun(output: Path) -> None:
    def begin() -> None:
        with partial_directory(output) as partial:
            fill(partial, "new")
            raise KeyboardInterrupt("of this test")

    with pytest.raises(KeyboardInterrupt, match="of this test"):
        begin()
    assert names(output.parent) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_full_disk_is_an_error_that_names_the_target(output: Path, number: int) -> None:
    def begin() -> None:
        with partial_directory(output):
            raise OSError(number, os.strerror(number))

    reason = f"speech.corpus: cannot be written ({os.strerror(number)}). Choose another place."
    with pytest.raises(CorpusError) as caught:
        begin()
    assert str(caught.value).endswith(reason)
    assert names(output.parent) == []


def test_other_errors_of_the_system_are_not_taken_for_a_full_disk(output: Path) -> None:
    def begin() -> None:
        with partial_directory(output):
            raise PermissionError(errno.EACCES, "Permission denied", "some/input.json")

    with pytest.raises(PermissionError, match=r"input\.json"):
        begin()
    assert names(output.parent) == []


def test_what_a_killed_run_left_is_cleared(output: Path) -> None:
    left = output.with_name("speech.corpus.partial")
    fill(left, "of the killed run")
    with partial_directory(output) as partial:
        assert partial == left
        assert names(partial) == []


def test_two_runs_into_one_target_are_refused_and_the_first_goes_on(output: Path) -> None:
    with partial_directory(output) as partial:
        fill(partial, "first")
        with (
            pytest.raises(CorpusError, match=r"speech\.corpus: another run is writing it"),
            partial_directory(output),
        ):
            pass
        with partial_directory(output.with_name("other.corpus")):
            pass
        move_into_place(partial, output)
    assert (output / "meta.json").read_text() == "first"


def test_a_run_whose_directory_another_has_moved_into_place_meanwhile_is_refused(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = output.with_name("speech.corpus.partial")

    def moved_meanwhile(descriptor: int, operation: int) -> None:  # noqa: ARG001, as the real one takes
        partial.rename(output)

    monkeypatch.setattr(fcntl, "flock", moved_meanwhile)
    with pytest.raises(CorpusError, match="another run is writing it"), partial_directory(output):
        pass
    assert output.is_dir()


def test_a_target_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with (
        pytest.raises(CorpusError, match=r"speech\.corpus: cannot be written \(Not a directory\)"),
        partial_directory(tmp_path / "file" / "speech.corpus"),
    ):
        pass
