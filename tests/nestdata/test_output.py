import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from nestdata import OutputError, output_directory, output_file
from nestdata.output import check_writable, has_json_kind
from tests.flushes import Flushes


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "speech.corpus"


def write_to(output: Path, *, overwrite: bool = False) -> AbstractContextManager[Path]:
    return output_directory(output, kind="a corpus", overwrite=overwrite, may_replace=is_corpus)


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
    with pytest.raises(OutputError, match=r"speech\.corpus: exists already\. .*--overwrite"), write_to(output):
        pytest.fail("the block ran")
    assert (names(output.parent), (output / "meta.json").read_text()) == (["speech.corpus"], "old")


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
@pytest.mark.parametrize("overwrite", [False, True])
def test_path_of_another_kind_is_never_replaced(output: Path, make: Callable[[Path], None], overwrite: bool) -> None:
    make(output)
    reason = "and is not a corpus" if overwrite else "Choose another path"
    with (
        pytest.raises(OutputError, match=rf"speech\.corpus: exists already.* {reason}"),
        write_to(output, overwrite=overwrite),
    ):
        pytest.fail("the block ran")
    assert names(output.parent) == ["speech.corpus"]


def test_finished_directory_is_renamed_to_its_target(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "down" / "speech.corpus"
    with write_to(output) as partial:
        assert (names(partial), output.exists()) == ([], False)
        fill(partial, "new")
    assert names(output.parent) == ["speech.corpus"]
    assert (output / "audio" / "0.wav").read_text() == "new"


def test_a_directory_is_on_disk_before_its_name_and_its_name_before_the_end(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    with write_to(output) as partial:
        fill(partial, "new")
    content = ["flush meta.json", "flush audio"]
    found = flushes.of(output, output.parent, *output.iterdir())
    assert sorted(found[:2]) == sorted(content)
    assert found[2:] == ["flush speech.corpus", "rename speech.corpus", f"flush {output.parent.name}"]


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


def test_partial_directory_of_a_killed_run_is_cleared(output: Path) -> None:
    left = output.with_name("speech.corpus.partial")
    fill(left, "of the killed run")
    with write_to(output) as partial:
        assert partial == left
        assert names(partial) == []


def test_second_run_into_one_target_is_refused_and_the_first_one_continues(output: Path) -> None:
    with write_to(output) as partial:
        fill(partial, "first")
        with pytest.raises(OutputError, match=r"speech\.corpus: another run is writing it"), write_to(output):
            pytest.fail("the block ran")
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
        output, kind="a corpus", overwrite=True, may_replace=is_corpus, resumable=("tasks", "shards")
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
    assert names(output.with_name("speech.corpus.partial")) == ["shards", "tasks"]
    with write_resumable(output) as partial:
        found = {str(path.relative_to(partial)): path.read_text() for path in partial.rglob("*") if path.is_file()}
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
