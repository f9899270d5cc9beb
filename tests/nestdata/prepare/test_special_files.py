"""Directories, pipes, sockets and devices instead of files: opening some of them would block for ever."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from nestdata import (
    AudioNoiseDataset,
    BatchPlan,
    InputFormat,
    ManifestError,
    PlanConfig,
    PrepareConfig,
    ProbeMode,
    prepare_corpus,
)
from tests.nestdata.prepare.inputs.reading import prepared
from tests.synthesis import folder_corpus, hiss, write_audio, write_jsonl

TIMEOUT_S = 60
KINDS = {
    "directory": "a directory",
    "pipe": "a pipe",
    "socket": "a socket",
    "null": "a character device",
    "zero": "a character device",
}


FORMATS: tuple[InputFormat, ...] = get_args(InputFormat)


@pytest.fixture(autouse=True)
def _no_test_blocks() -> Iterator[None]:
    """Interrupts a test that waits for a pipe."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"the test was blocked for {TIMEOUT_S} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(TIMEOUT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_special(path: Path, kind: str) -> Path:
    """Creates a directory, pipe or socket at a path, or a symbolic link to a device."""
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            # Bound by a relative name, because the path of a socket may have 107 bytes at most.
            before = os.getcwd()
            os.chdir(path.parent)
            try:
                with socket.socket(socket.AF_UNIX) as bound:
                    bound.bind(path.name)
            finally:
                os.chdir(before)
        case device:
            path.symlink_to(f"/dev/{device}")
    return path


@pytest.mark.parametrize(
    ("kind", "probe"),
    [("directory", "all"), ("socket", "all"), ("zero", "all"), *(("pipe", probe) for probe in get_args(ProbeMode))],
)
def test_special_files_in_a_manifest_are_rejected_without_opening_them(
    tmp_path: Path, kind: str, probe: ProbeMode
) -> None:
    write_audio(tmp_path / "a.wav", hiss(8000, 1))
    special = make_special(tmp_path / "special.wav", kind)
    manifest = write_jsonl(tmp_path / "m.json", [{"audio_filepath": "special.wav"}, {"audio_filepath": "a.wav"}])
    cuts, (reject,) = prepared(manifest, probe=probe)
    assert list(cuts) == ["a"]
    assert (reject["where"], reject["reason"]) == (f"{manifest}:1", "not_a_file")
    assert reject["detail"] == f"{special} is {KINDS[kind]}"
    assert "directories, pipes, sockets and devices" in (tmp_path / "m.json.corpus" / "report.html").read_text()


def test_training_replaces_a_cut_whose_file_became_a_pipe(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(4)})
    (tmp_path / "speech" / "2.wav").unlink()
    make_special(tmp_path / "speech" / "2.wav", "pipe")
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=2.0, microbatches_per_step=2))
    batches = [AudioNoiseDataset(corpus, plan)[0, microbatch] for microbatch in range(2)]
    assert {(cut.cut_id, cut.reason) for batch in batches for cut in batch.bad_cuts} == {("2", "not_a_file")}
    assert all("2" not in batch.sample_id for batch in batches)
    assert sum(len(batch.sample_id) for batch in batches) == 4


@pytest.mark.parametrize(("kind", "form"), [("pipe", None), ("zero", None), ("pipe", "lhotse"), ("pipe", "fairseq")])
def test_a_manifest_that_is_a_special_file_is_an_error_that_says_so(tmp_path: Path, kind: str, form: Any) -> None:
    special = make_special(tmp_path / "m.json", kind)
    message = rf"m\.json: {KINDS[kind]}, not a file\. .* Write the manifest to a file, and give that\."
    with pytest.raises(ManifestError, match=message):
        prepare_corpus([special], tmp_path / "speech.corpus", PrepareConfig(format=form))
    assert not (tmp_path / "speech.corpus.partial").exists()


@pytest.mark.parametrize("kind", ["pipe", "socket", "zero"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_special_file_is_no_input_of_any_format(tmp_path: Path, kind: str, form: InputFormat) -> None:
    path = make_special(tmp_path / "input", kind)
    with pytest.raises(ManifestError):
        prepare_corpus([path], tmp_path / "speech.corpus", PrepareConfig(format=form))
