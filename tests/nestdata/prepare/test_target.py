"""What a run of `prepare` leaves at its target: if there is something, if it is ended, if the disk is full."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from nestdata import (
    Corpus,
    CorpusError,
    ManifestError,
    OutputError,
    PrepareConfig,
    prepare_corpus,
)
from tests.nestdata.full_disk import files_up_to
from tests.nestdata.prepare.corpora import tree
from tests.synthesis import hiss, write_audio

REPOSITORY = Path(__file__).parents[3]


def test_an_existing_corpus_is_replaced_on_request(manifest: Path, tmp_path: Path) -> None:
    write_audio(tmp_path / "other" / "x.wav", hiss(16000, 1))
    prepare_corpus([tmp_path / "other"], tmp_path / "speech.corpus")
    opened_before = Corpus.open(tmp_path / "speech.corpus")
    prepare_corpus([manifest], tmp_path / "speech.corpus", overwrite=True)
    assert len(Corpus.open(tmp_path / "speech.corpus")) == 3
    assert opened_before[0].id == "x"  # what was opened before is still whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "other", "speech.corpus"]


def test_a_corpus_behind_a_symbolic_link_is_replaced_at_its_own_path(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    prepare_corpus([manifest], tmp_path / "disk" / "speech.corpus", PrepareConfig(sampling_rate=8000))
    (tmp_path / "speech.corpus").symlink_to(tmp_path / "disk" / "speech.corpus")
    prepare_corpus([manifest], tmp_path / "speech.corpus", overwrite=True)
    assert (tmp_path / "speech.corpus").is_symlink()
    assert Corpus.open(tmp_path / "disk" / "speech.corpus").sampling_rate == 16000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "disk", "speech.corpus"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["speech.corpus"]


def test_a_path_that_is_not_a_corpus_is_never_replaced(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    (tmp_path / "file").write_text("a file")
    before = tree(tmp_path)
    for name in ("notes", "file"):
        with pytest.raises(OutputError, match="exists already"):
            prepare_corpus([manifest], tmp_path / name, overwrite=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"audio_filepath": "wavs/0.flac"}'] * 6 + ["{"], r"bad\.json:7: not JSON"),
        (['{"audio_filepath": "wavs/0.flac"}', '{"text": "a"}'], r"bad\.json:2: no audio_filepath among text"),
        (['{"audio_filepath": "wavs/0.flac", "duration": 0.5}'] * 510 + ["{"], r"bad\.json:511: not JSON"),
        (
            ['{"audio_filepath": "wavs/gone.flac"}'],
            r"bad\.json: no usable cut among 1 entries \(1 missing\); the first: .*bad\.json:1: missing, .*gone\.flac",
        ),
        ([], r"bad\.json: the manifest is empty"),
    ],
)
def test_a_bad_manifest_is_an_error_that_names_the_line_and_leaves_nothing_behind(
    manifest: Path, tmp_path: Path, lines: list[str], message: str
) -> None:
    bad = manifest.with_name("bad.json")
    bad.write_text("".join(f"{line}\n" for line in lines))
    prepare_corpus([manifest], tmp_path / "speech.corpus")
    before = tree(tmp_path)
    with pytest.raises(ManifestError, match=message):
        prepare_corpus([bad], tmp_path / "speech.corpus", PrepareConfig(probe="missing"), overwrite=True)
    assert tree(tmp_path) == before


def test_a_missing_manifest_is_an_error_before_any_work(manifest: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    seen: list[int] = []
    with pytest.raises(ManifestError, match=r"gone\.json: does not exist"):
        prepare_corpus(
            [manifest, tmp_path / "gone.json"],
            tmp_path / "speech.corpus",
            on_progress=lambda found: seen.append(found.entries + (found.total_entries or 0)),
        )
    assert seen == []
    assert tree(tmp_path) == before


@contextmanager
def busy_prepare(manifest: Path, output: Path) -> Iterator[tuple["subprocess.Popen[bytes]", BinaryIO]]:
    """Runs `prepare` with two jobs in a new session; its worker reads from a pipe, which never ends.

    Yields:
        The process, and the writing end of the pipe.
    """
    pipe = manifest.parent / "pipe"
    os.mkfifo(pipe)
    program = """
import sys
from nestdata import prepare_corpus
from nestdata.prepare import run
from tests.nestdata.prepare.endless_task import read_pipe
run.run_task = read_pipe
prepare_corpus([sys.argv[1]], sys.argv[2], jobs=2)
"""
    command = [sys.executable, "-c", program, str(manifest), str(output)]
    environment = {**os.environ, "ENDLESS_TASK_PIPE": str(pipe)}
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, cwd=REPOSITORY, env=environment)
        )
        stack.callback(process.kill)
        yield process, stack.enter_context(pipe.open("wb"))  # returns once a worker has opened the pipe


def has_no_reader(pipe: BinaryIO, timeout_s: float = 30) -> bool:
    """Waits until no process has the reading end of a pipe open, and returns whether that happened in time."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(1000 * timeout_s))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_worker_processes_of_a_killed_prepare_end_by_themselves(manifest: Path, tmp_path: Path) -> None:
    output = tmp_path / "speech.corpus"
    with busy_prepare(manifest, output) as (process, pipe):
        assert not has_no_reader(pipe, 0)
        process.kill()
        assert process.wait(timeout=300) == -signal.SIGKILL
        assert has_no_reader(pipe)
    for path in (output, tmp_path / "speech.corpus.partial"):
        with pytest.raises(CorpusError):
            Corpus.open(path)
    assert prepare_corpus([manifest], output).rejected == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "speech.corpus"]


def assert_one_interruption(errors: str) -> None:
    assert [line for line in errors.splitlines() if line[:1].isalpha()] == [
        "Traceback (most recent call last):",
        "KeyboardInterrupt",
    ]


@pytest.mark.multiprocess
def test_ctrl_c_ends_all_processes_with_one_traceback_and_leaves_nothing_behind(manifest: Path, tmp_path: Path) -> None:
    with busy_prepare(manifest, tmp_path / "speech.corpus") as (process, pipe):
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals the whole process group
        assert process.stderr is not None
        errors = process.stderr.read().decode()
        assert process.wait(timeout=300) == -signal.SIGINT
        assert has_no_reader(pipe)
    assert_one_interruption(errors)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_names_the_target_and_leaves_nothing_behind(
    manifest: Path, long_manifest: Path, tmp_path: Path
) -> None:
    output = tmp_path / "speech.corpus"
    prepare_corpus([manifest], output)
    before = tree(tmp_path)
    config = PrepareConfig(pcm=True, probe="missing")
    for kilobytes in (0, 1, 20, 100, 300):
        message = r"speech\.corpus: cannot be written \(File too large\)\. Choose another path\."
        with files_up_to(1000 * kilobytes), pytest.raises(OutputError, match=message):
            prepare_corpus([long_manifest], output, config, overwrite=True)
        assert tree(tmp_path) == before
    assert prepare_corpus([long_manifest], output, config, overwrite=True).num_cuts == 1200
