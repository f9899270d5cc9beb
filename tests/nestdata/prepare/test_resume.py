"""Runs of `prepare` that end early, and the next ones, which take what is finished."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nestdata import Corpus, ManifestError, OutputError, PrepareConfig, PrepareProgress, prepare_corpus
from tests.nestdata.full_disk import files_up_to
from tests.nestdata.prepare.corpora import tree
from tests.nestdata.prepare.inputs.shards import shar_cut, write_tar
from tests.nestdata.prepare.parquet_files import embedded, write_parquet
from tests.synthesis import hiss, read_jsonl, tone, write_audio, write_jsonl

NUM_FILES = 4
# Prepares a folder of Parquet files, prints the name of each one that is read, and waits after `sys.argv[3]` of them.
PROGRAM = """
import os, sys
from nestdata import prepare_corpus
def audit(event, args):
    if event == "open" and str(args[0]).endswith(".parquet"):
        print(os.path.basename(args[0]), flush=True)
def wait(found):
    if 0 < found.shards == int(sys.argv[3]):
        print("waiting", flush=True)
        sys.stdin.read()
sys.addaudithook(audit)
prepare_corpus([sys.argv[1]], sys.argv[2], on_progress=wait)
"""


def run(data: Path, output: Path, *, kill_after: int = 0) -> list[str]:
    """Prepares a corpus in another process, which may be killed, and returns the names of the files that it read."""
    command = [sys.executable, "-c", PROGRAM, str(data), str(output), str(kill_after)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        names = []
        for line in process.stdout:
            if line == "waiting\n":
                process.kill()
            else:
                names.append(line.strip())
        process.wait(timeout=300)
    return names


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of Parquet files, each with two files of audio and a bad one."""
    for number in range(NUM_FILES):
        rows = [embedded(hiss(8000 + number, number)), {"bytes": b"bad", "path": None}, embedded(tone(300, 1.0))]
        write_parquet(tmp_path / "data" / f"{number}.parquet", rows, text=["a", "b", f"wort ü{number}"])
    return tmp_path / "data"


@pytest.mark.smoke
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_killed_run_is_continued_without_reading_finished_files_again(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "speech.corpus"
    names = [f"{number}.parquet" for number in range(NUM_FILES)]
    assert run(data, output) == names
    expected = tree(output)
    output.rename(tmp_path / "unbroken")
    assert run(data, output, kill_after=2) == names[:2]
    assert not output.exists()
    assert run(data, output) == names[2:]
    assert tree(output) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "speech.corpus", "unbroken"]


def interrupted(data: Path, output: Path, config: PrepareConfig | None = None, *, after: int = 0) -> None:
    """Interrupts a run after this many Parquet files, or after the first entry."""

    def interrupt(found: PrepareProgress) -> None:
        if found.entries and after in (0, found.shards):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus([data], output, config, on_progress=interrupt)


def reads(data: Path, output: Path, config: PrepareConfig | None = None) -> int:
    """Prepares a corpus, and returns the number of Parquet files whose tars were written by this call."""
    started = time.time_ns()
    prepare_corpus([data], output, config, overwrite=True)
    return sum(path.stat().st_ctime_ns >= started for path in output.rglob("*.tar"))


def test_changed_inputs_and_settings_are_read_again(data: Path, tmp_path: Path) -> None:
    output, config = tmp_path / "speech.corpus", PrepareConfig(min_seconds=0.2)
    interrupted(data, output, after=3)
    kept = sorted(path.name for path in (tmp_path / "speech.corpus.partial").rglob("*") if path.is_file())
    assert len(kept) == 7  # the mark, the results and the tars of three files
    os.utime(data / "1.parquet", (1, 1))
    assert reads(data, output) == NUM_FILES - 2
    interrupted(data, tmp_path / "other.corpus", after=3)
    assert reads(data, tmp_path / "other.corpus", config) == NUM_FILES
    assert Corpus.open(tmp_path / "other.corpus").fingerprint == Corpus.open(output).fingerprint


def test_rejected_audio_that_was_repaired_is_probed_again(tmp_path: Path) -> None:
    good, bad = write_audio(tmp_path / "good.wav", hiss(8000, 1)), tmp_path / "bad.wav"
    tar = write_tar(tmp_path / "a.tar", [("good.wav", good.read_bytes())])
    start = tar.read_bytes().index(good.read_bytes()) - 512
    rows = [shar_cut(name, 8000)[0] | {"start": 0.0} for name in ("good", "bad")]
    rows[0]["recording"]["sources"][0] |= {"type": "shar_ptr", "source": f"{tar}?o={start}&e={start}"}
    rows[1]["recording"]["sources"][0] |= {"type": "file", "source": str(bad)}
    bad.write_bytes(b"not audio")
    manifest, output = write_jsonl(tmp_path / "cuts.jsonl", rows), tmp_path / "speech.corpus"
    for _ in range(2):
        interrupted(manifest, output)
    assert len([*(tmp_path / "speech.corpus.partial" / "tasks").iterdir()]) == 1
    bad.write_bytes(good.read_bytes())
    report = prepare_corpus([manifest], output)
    assert (report.num_cuts, report.rejected) == (2, {})


def test_files_that_were_decoded_are_not_decoded_again(tmp_path: Path) -> None:
    for number in range(30):
        write_audio(tmp_path / "in" / f"{number:02}.wav", hiss(8000, number))
    first = write_audio(tmp_path / "in" / "00.wav", np.stack([hiss(8000, 0)] * 2, axis=1))
    output, config = tmp_path / "speech.corpus", PrepareConfig(probe="decode")
    interrupted(tmp_path / "in", output, config)
    changed_at = first.stat().st_mtime_ns
    write_audio(first, np.zeros((8000, 2), np.float32))  # rejected as silent, if it is decoded
    os.utime(first, ns=(changed_at, changed_at))
    assert prepare_corpus([tmp_path / "in"], output, config, jobs=1).rejected == {}
    (note,) = read_jsonl(output / "notes.jsonl")
    assert (note["kind"], note["where"]) == ("first_channel", str(first))


def test_bad_files_alone_leave_nothing_behind(tmp_path: Path) -> None:
    write_audio(tmp_path / "in" / "a.wav", np.zeros(8000, np.float32))
    with pytest.raises(ManifestError, match="silent"):
        prepare_corpus([tmp_path / "in"], tmp_path / "speech.corpus", PrepareConfig(probe="decode"), jobs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_damaged_results_and_tars_that_are_gone_are_made_again(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "speech.corpus"
    interrupted(data, output, after=3)
    first, second, _ = sorted((tmp_path / "speech.corpus.partial" / "tasks").iterdir())
    first.write_bytes(first.read_bytes()[:-20])
    second.write_bytes(b"")
    sorted((tmp_path / "speech.corpus.partial" / "shards").rglob("*.tar"))[0].unlink()
    report = prepare_corpus([data], output)
    assert (report.num_cuts, report.rejected) == (2 * NUM_FILES, {"unreadable": NUM_FILES})


def test_tars_of_files_that_are_no_longer_inputs_do_not_get_into_the_corpus(data: Path, tmp_path: Path) -> None:
    interrupted(data, tmp_path / "speech.corpus", after=3)
    prepare_corpus([data / "0.parquet"], tmp_path / "speech.corpus")
    assert [path.name for path in (tmp_path / "speech.corpus").rglob("*.tar")] == ["0-000001.tar"]


def test_finished_work_survives_a_full_disk_and_says_so(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "speech.corpus"
    write_parquet(data / "3.parquet", [embedded(hiss(400_000, 1))])
    with files_up_to(300_000), pytest.raises(OutputError, match="cannot be written"):
        prepare_corpus([data], output)
    assert "the results of 3 finished tasks are kept in" in caplog.text
    assert reads(data, output) == 1
