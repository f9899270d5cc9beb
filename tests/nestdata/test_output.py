import ctypes
import errno
import os
import re
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from nestdata import OutputError, output_directory, output_file
from nestdata.output import (
    MARK,
    check_writable,
    has_json_kind,
    replace_file,
    replaced_file,
    unfinished_files,
    unfinished_name,
)
from tests.flushes import Flushes

NAMES = re.compile(r"meta\.json|audio|tasks|shards")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "speech.corpus"


def write_to(output: Path, *, overwrite: bool = False) -> AbstractContextManager[Path]:
    return output_directory(output, kind="a corpus", names=NAMES, overwrite=overwrite, may_replace=is_corpus)


def check_refused(output: Path, message: str, *, overwrite: bool = False) -> None:
    """Checks that an output is refused before anything is written."""
    with pytest.raises(OutputError, match=message), write_to(output, overwrite=overwrite):
        pytest.fail("the block ran")


def is_corpus(directory: Path) -> bool:
    return (directory / "meta.json").is_file()


def fill(directory: Path, content: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "meta.json").write_text(content)
    (directory / "audio").mkdir()
    (directory / "audio" / "0.wav").write_text(content)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_existing_directory_is_refused_before_the_block_runs_unless_overwrite_is_set(output: Path) -> None:
    fill(output, "old")
    check_refused(output, r"speech\.corpus: exists already\. .*--overwrite")
    assert (names(output.parent), (output / "meta.json").read_text()) == (["speech.corpus"], "old")


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
@pytest.mark.parametrize("overwrite", [False, True])
def test_path_of_another_kind_is_never_replaced(output: Path, make: Callable[[Path], None], overwrite: bool) -> None:
    make(output)
    reason = "and is not a corpus" if overwrite else "Choose another path"
    check_refused(output, rf"speech\.corpus: exists already.* {reason}", overwrite=overwrite)
    assert names(output.parent) == ["speech.corpus"]


def test_finished_directory_is_renamed_to_its_target(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "down" / "speech.corpus"
    with write_to(output) as partial:
        assert (names(partial), output.exists()) == ([MARK], False)
        fill(partial, "new")
    assert names(output.parent) == ["speech.corpus"]
    assert (output / "audio" / "0.wav").read_text() == "new"


def test_a_directory_is_on_disk_before_its_name_and_its_name_before_the_end(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    with write_to(output) as partial:
        fill(partial, "new")
    begin, *found = flushes.of(output, output.parent, *output.rglob("*"))
    assert begin == "rename speech.corpus"  # to the name of unfinished folders, with the mark in it
    assert sorted(found[:3]) == ["flush 0.wav", "flush audio", "flush meta.json"]
    assert found.index("flush 0.wav") < found.index("flush audio")
    assert found[3:] == ["flush speech.corpus", "rename speech.corpus", f"flush {output.parent.name}"]


def test_a_file_is_on_disk_before_its_name_and_its_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes, target = Flushes(monkeypatch), tmp_path / "model.onnx"
    with output_file(target, overwrite=False) as path:
        path.write_text("model")
    assert flushes.of(target, tmp_path) == ["flush model.onnx", "rename model.onnx", f"flush {tmp_path.name}"]


@pytest.mark.parametrize("swaps", [True, False])
def test_old_directory_is_replaced_at_the_end_and_removed(
    output: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:  # as on systems without renameat2
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    fill(output, "old")
    with write_to(output, overwrite=True) as partial:
        fill(partial, "new")
        assert (output / "meta.json").read_text() == "old"
    assert names(output.parent) == ["speech.corpus"]
    assert (output / "audio" / "0.wav").read_text() == "new"


def test_directory_that_another_run_finished_in_the_meantime_is_not_replaced(output: Path) -> None:
    def write_while_another_run_finishes() -> None:
        with write_to(output) as partial:
            fill(partial, "new")
            fill(output, "of another run")

    with pytest.raises(OutputError, match=r"speech\.corpus: exists already"):
        write_while_another_run_finishes()
    assert (names(output.parent), (output / "meta.json").read_text()) == (["speech.corpus"], "of another run")


def test_error_in_the_block_removes_the_partial_directory(output: Path) -> None:
    def write_partly() -> None:
        with write_to(output) as partial:
            fill(partial, "new")
            raise KeyboardInterrupt("of this test")

    with pytest.raises(KeyboardInterrupt, match="of this test"):
        write_partly()
    assert names(output.parent) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_an_error_that_names_the_target(output: Path, number: int) -> None:
    def fill_the_disk() -> None:
        with write_to(output):
            raise OSError(number, os.strerror(number))

    with pytest.raises(OutputError) as caught:
        fill_the_disk()
    assert str(caught.value) == f"{output}: cannot be written ({os.strerror(number)}). Choose another path."
    assert names(output.parent) == []


def test_other_system_errors_are_not_reported_as_a_full_disk(output: Path) -> None:
    def fail_to_read() -> None:
        with write_to(output):
            raise PermissionError(errno.EACCES, "Permission denied", "some/input.json")

    with pytest.raises(PermissionError, match=r"input\.json"):
        fail_to_read()
    assert names(output.parent) == []


def killed_in_the_block(output: Path) -> Path:
    """Returns the folder that a killed process leaves."""
    if not (child := os.fork()):
        with write_to(output) as partial:
            fill(partial, "of the killed run")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    return output.with_name(f"{output.name}.partial")


def test_partial_directory_of_a_killed_run_is_cleared(output: Path) -> None:
    left = killed_in_the_block(output)
    assert names(left) == [MARK, "audio", "meta.json"]
    with write_to(output) as partial:
        assert partial == left
        assert names(partial) == [MARK]


def test_second_run_into_one_target_is_refused_and_the_first_one_continues(output: Path) -> None:
    with write_to(output) as partial:
        fill(partial, "first")
        check_refused(output, r"speech\.corpus: another run is writing it")
        with write_to(output.with_name("other.corpus")):
            pass
    assert (output / "meta.json").read_text() == "first"


def test_output_file_is_moved_to_its_target_together_with_the_files_beside_it(tmp_path: Path) -> None:
    with output_file(tmp_path / "graph.onnx", overwrite=False) as path:
        path.write_text("graph")
        path.with_name("graph.onnx.data").write_text("weights")
        assert not (tmp_path / "graph.onnx.data").exists()
    assert names(tmp_path) == ["graph.onnx", "graph.onnx.data"]
    assert (tmp_path / "graph.onnx").read_text() == "graph"


def test_existing_file_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "model.nemo"
    path.write_text("old")
    with (
        pytest.raises(OutputError, match=r"model\.nemo: exists already\. .*--overwrite"),
        output_file(path, overwrite=False),
    ):
        pytest.fail("the block ran")
    assert path.read_text() == "old"
    with output_file(path, overwrite=True) as partial:
        partial.write_text("new")
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("content", "expected"),
    [('{"kind": "probe"}', True), ('{"kind": "features"}', False), ("{", False), (None, False)],
)
def test_json_kind_is_read_from_the_field_kind(tmp_path: Path, content: str | None, expected: bool) -> None:
    if content is not None:
        (tmp_path / "meta.json").write_text(content)
    assert has_json_kind(tmp_path, "meta.json", "probe") is expected


def write_resumable(output: Path) -> AbstractContextManager[Path]:
    return output_directory(
        output, kind="a corpus", names=NAMES, overwrite=True, may_replace=is_corpus, resumable=("tasks", "shards")
    )


def fail(output: Path, **files: str) -> None:
    """Writes files whose names hold an underscore for the slash, beside others, and fails."""
    with suppress(KeyboardInterrupt), write_resumable(output) as partial:
        fill(partial, "unfinished")
        for name in ("tasks", "shards"):
            (partial / name).mkdir(exist_ok=True)
        for name, content in files.items():
            (partial / name.replace("_", "/", 1)).write_text(content)
        raise KeyboardInterrupt


def test_finished_work_stays_after_an_error_and_is_found_by_the_next_run(output: Path) -> None:
    fail(output, tasks_1="one")
    fail(output, shards_a="tar")
    assert names(output.with_name("speech.corpus.partial")) == [MARK, "shards", "tasks"]
    with write_resumable(output) as partial:
        found = {str(path.relative_to(partial)): path.read_text() for path in partial.glob("*/*")}
        assert found == {"tasks/1": "one", "shards/a": "tar"}
        (partial / "tasks" / "1").unlink()
        (partial / "tasks").rmdir()
    assert names(output.parent) == ["speech.corpus"]
    assert names(output) == ["shards"]


def test_a_missing_directory_is_created_by_the_check_that_files_can_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "runs" / "demo")
    check_writable(tmp_path / "runs" / "demo")
    assert names(tmp_path / "runs" / "demo") == []
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file/runs"):
        check_writable(tmp_path / "file" / "runs")


def digests(directory: Path) -> dict[str, str]:
    """Returns what is at every path below a directory: the target of a link, the content of a file, or a folder."""
    return {str(path.relative_to(directory)): digest(path) for path in directory.rglob("*")}


def digest(path: Path) -> str:
    if path.is_symlink():
        return os.readlink(path)
    return path.read_text() if path.is_file() else ""


def folder_of_a_user(path: Path) -> None:
    fill(path, "of a user")


def folder_with_a_mark_for_another_output(path: Path) -> None:
    killed_in_the_block(path.with_name("another.corpus")).rename(path)


def folder_with_a_mark_of_another_kind(path: Path) -> None:
    fail(path.with_name("speech.corpus"), tasks_1="one")
    (path / MARK).write_text((path / MARK).read_text().replace("a corpus", "a probe"))


def link_to_a_folder(path: Path) -> None:
    fill(path.with_name("elsewhere"), "of a user")
    path.symlink_to("elsewhere")


def link_to_a_folder_with_a_mark(path: Path) -> None:
    killed_in_the_block(path.with_name("speech.corpus")).rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def mark_that_is_a_link(path: Path) -> None:
    folder = killed_in_the_block(path.with_name("speech.corpus"))
    (folder / MARK).rename(path.with_name("mark"))
    (folder / MARK).symlink_to("../mark")


@pytest.mark.parametrize("make", [
    Path.touch, Path.mkdir, folder_of_a_user, folder_with_a_mark_for_another_output, folder_with_a_mark_of_another_kind,
    link_to_a_folder, link_to_a_folder_with_a_mark, link_to_nothing, mark_that_is_a_link,
])  # fmt: skip
def test_what_this_program_has_not_made_for_this_output_stays(output: Path, make: Callable[[Path], None]) -> None:
    make(output.with_name("speech.corpus.partial"))
    before = digests(output.parent)
    check_refused(output, r"speech\.corpus\.partial: ")
    with pytest.raises(OutputError, match=r"speech\.corpus\.partial: "), output_file(output, overwrite=True):
        pytest.fail("the block ran")
    assert digests(output.parent) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_the_folder_of_another_user_stays(output: Path) -> None:
    left = killed_in_the_block(output)
    os.chown(left, 12345, -1)
    check_refused(output, r"speech\.corpus\.partial: is in the way")
    assert names(left) == [MARK, "audio", "meta.json"]


def test_an_output_with_a_file_of_a_user_is_not_replaced(output: Path) -> None:
    fill(output, "old")
    (output / "diary.txt").write_text("precious")
    check_refused(output, r"'diary\.txt' is not a part of it", overwrite=True)
    assert (output / "diary.txt").read_text() == "precious"


@pytest.mark.parametrize(
    "given", ["speech.corpus", "speech.corpus/audio", "speech.corpus.partial", "link", "speech.corpus/audio/.."]
)
def test_an_input_that_would_be_replaced_is_refused(output: Path, given: str) -> None:
    fill(output, "old")
    fill(output.with_name("speech.corpus.partial"), "of a user")
    (output.parent / "link").symlink_to("speech.corpus/audio")
    before, inputs = digests(output.parent), [output.parent / given]
    with (
        pytest.raises(OutputError, match=r"input.* would be replaced"),
        output_directory(output, kind="a corpus", names=NAMES, overwrite=True, may_replace=is_corpus, inputs=inputs),
    ):
        pytest.fail("the block ran")
    assert digests(output.parent) == before


def test_a_run_that_was_killed_while_the_old_output_was_replaced_leaves_it_to_the_next(output: Path) -> None:
    fill(killed_in_the_block(output) / ".replaced", "old")
    with pytest.raises(OutputError, match="exists already"), write_to(output):
        assert (output / "meta.json").read_text() == "old"
    assert names(output.parent) == ["speech.corpus"]


@pytest.mark.parametrize("swaps", [True, False])
def test_a_run_that_is_killed_at_any_call_of_the_system_is_followed_by_another(
    output: Path, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills a process that replaces an output before each of its renames and removals in turn."""
    if not swaps:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    for number in range(40):
        with suppress(OutputError), write_to(output, overwrite=True) as partial:
            fill(partial, "old")
        if not (child := os.fork()):
            _kill_at_call(number)
            with write_to(output, overwrite=True) as partial:
                fill(partial, "new")
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        assert output.exists() or not swaps
        with suppress(OutputError), write_to(output):
            pass  # restores the old output, if it was moved
        assert (output / "meta.json").read_text() in ("old", "new")
        with write_to(output, overwrite=True) as partial:
            fill(partial, "newer")
        assert (names(output.parent), (output / "meta.json").read_text()) == (["speech.corpus"], "newer")
        assert names(output) == ["audio", "meta.json"]
        if not killed:
            assert number > 5
            return
    pytest.fail("the process never came to its end")


def _kill_at_call(number: int) -> None:
    """Makes this process kill itself before its n-th call that creates, renames or removes something."""
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal calls
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return call(*args, **options)

        return run

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
        setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_file_beside_an_output_file_is_lost(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "graph.onnx.data").mkdir() if overwrite else (tmp_path / "graph.onnx.data").write_text("of a user")

    def write() -> None:
        with output_file(tmp_path / "graph.onnx", overwrite=overwrite) as path:
            path.write_text("graph")
            path.with_name("graph.onnx.data").write_text("weights")

    before = digests(tmp_path)
    with pytest.raises(OutputError, match=r"graph\.onnx\.data: "):
        write()
    assert digests(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_is_replaced_only_with_overwrite_and_what_it_points_to_stays(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "model").write_text("old")
    link = tmp_path / "link"
    link.symlink_to("model")
    with suppress(OutputError), output_file(link, overwrite=overwrite) as path:
        path.write_text("new")
    assert (link.is_symlink(), link.read_text()) == ((False, "new") if overwrite else (True, "old"))
    assert (tmp_path / "model").read_text() == "old"


@pytest.mark.parametrize("target", [".", "/"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_without_a_name_is_refused(target: str, overwrite: bool, tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"cannot be an output|exists already"),
        output_directory(
            Path(target), kind="a corpus", names=NAMES, overwrite=overwrite, may_replace=is_corpus, inputs=[tmp_path]
        ),
    ):
        pytest.fail("the block ran")


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="is not a file"), output_file(tmp_path / "pipe", overwrite=True):
        pytest.fail("the block ran")


def test_files_of_the_program_are_replaced_in_one_step_and_only_their_own_names_are_known_as_unfinished(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.json"
    for name in (".state.json.partial", "state.json.partial", ".other.json.0123456789ab.partial"):
        (tmp_path / name).write_text("of a user")
    unfinished_name(path).write_text("half")
    assert len(unfinished_files(tmp_path, re.compile(r"state\.json"))) == 1
    replace_file(path, b"new")
    assert path.read_text() == "new"

    def fail_to_write() -> None:
        with replaced_file(path) as file:
            file.write(b"newer")
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        fail_to_write()
    assert path.read_text() == "new"
    assert len(unfinished_files(tmp_path, re.compile(r"state\.json"))) == 1
