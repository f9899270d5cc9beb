"""Directories, pipes, sockets and devices instead of files: opening some of them would block for ever."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lhotse import AudioSource, MonoCut, Recording

from nestdata import (
    AudioError,
    AudioNoiseDataset,
    BatchPlan,
    ManifestError,
    PlanConfig,
    PrepareConfig,
    ProbeMode,
    prepare_corpus,
)
from nestdata.audio.decode import load_samples
from nestdata.audio.file_kind import special_file_kind
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_special_file_is_named(tmp_path: Path, kind: str) -> None:
    assert special_file_kind(make_special(tmp_path / "special", kind)) == KINDS[kind]


def test_files_and_missing_paths_have_no_special_kind(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert [special_file_kind(tmp_path / name) for name in ("file", "link", "loop", "gone", "a\0b")] == [None] * 5


@pytest.mark.parametrize("probe", ["missing", "all", "decode"])
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("probe", ["all", "decode"])
def test_a_pipe_in_a_lhotse_manifest_is_rejected_without_opening_it(tmp_path: Path, probe: ProbeMode) -> None:
    write_audio(tmp_path / "a.wav", hiss(8000, 1))
    make_special(tmp_path / "pipe.wav", "pipe")
    recordings = [
        Recording(name, [AudioSource("file", [0], str(tmp_path / f"{name}.wav"))], 16000, 8000, 0.5).to_dict()
        for name in ("a", "pipe")
    ]
    cuts, (reject,) = prepared(write_jsonl(tmp_path / "recordings.jsonl", recordings), probe=probe)
    assert (list(cuts), reject["cut_id"], reject["reason"]) == (["a"], "pipe", "not_a_file")


def test_a_pipe_in_a_folder_of_audio_is_rejected(tmp_path: Path) -> None:
    write_audio(tmp_path / "audio" / "a.wav", hiss(8000, 1))
    make_special(tmp_path / "audio" / "b.wav", "pipe")
    cuts, (reject,) = prepared(tmp_path / "audio")
    assert (list(cuts), reject["cut_id"], reject["reason"]) == (["a"], "b", "not_a_file")


def test_a_pipe_with_a_trusted_duration_is_marked_as_unusable_in_the_sample_bank(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", hiss(8000, 1))
    make_special(tmp_path / "pipe.wav", "pipe")
    rows = [{"audio_filepath": "a.wav", "duration": 0.5}, {"audio_filepath": "pipe.wav", "duration": 0.25}]
    prepared(write_jsonl(tmp_path / "m.json", rows), probe="missing", pcm=True)
    assert np.isnan(np.load(tmp_path / "m.json.corpus" / "bank.npy")["gain"]).tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("speed", [1.0, 1.1])
def test_loading_a_cut_of_a_special_file_is_an_error_without_opening_it(
    tmp_path: Path, kind: str, speed: float
) -> None:
    special = make_special(tmp_path / "special.wav", kind)
    recording = Recording("r", [AudioSource("file", [0], str(special))], 16000, 16000, 1.0)
    if speed != 1.0:
        recording = recording.perturb_speed(speed)  # Lhotse loads recordings with this transform
    with pytest.raises(AudioError, match=rf"cut 'c': .*it is {KINDS[kind]}, not a file") as caught:
        load_samples(MonoCut("c", 0.0, 0.5, 0, recording=recording))
    assert caught.value.reason == "not_a_file"


@pytest.mark.parametrize("kind", KINDS)
def test_training_replaces_a_cut_whose_file_became_a_special_file(tmp_path: Path, kind: str) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(4)})
    (tmp_path / "speech" / "2.wav").unlink()
    make_special(tmp_path / "speech" / "2.wav", kind)
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=2.0, microbatches_per_step=2))
    batches = [AudioNoiseDataset(corpus, plan)[0, microbatch] for microbatch in range(2)]
    assert {(cut.cut_id, cut.reason) for batch in batches for cut in batch.bad_cuts} == {("2", "not_a_file")}
    assert all("2" not in batch.sample_id for batch in batches)
    assert sum(len(batch.sample_id) for batch in batches) == 4


@pytest.mark.parametrize("form", [None, "nemo", "lhotse", "fairseq"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "null", "zero"])
def test_a_manifest_that_is_a_special_file_is_an_error_that_says_so(tmp_path: Path, kind: str, form: Any) -> None:
    special = make_special(tmp_path / "m.json", kind)
    message = rf"m\.json: {KINDS[kind]}, not a file\. .* Write the manifest to a file, and give that\."
    with pytest.raises(ManifestError, match=message):
        prepare_corpus([special], tmp_path / "speech.corpus", PrepareConfig(format=form))
    assert not (tmp_path / "speech.corpus.partial").exists()


@pytest.mark.parametrize("name", ["text", "segments"])
def test_a_pipe_in_a_kaldi_directory_is_an_error(tmp_path: Path, name: str) -> None:
    write_audio(tmp_path / "a.wav", hiss(8000, 1))
    (tmp_path / "wav.scp").write_text("u1 a.wav\n")
    make_special(tmp_path / name, "pipe")
    with pytest.raises(ManifestError, match=rf"{name}: a pipe, not a file\."):
        prepare_corpus([tmp_path], tmp_path / "speech.corpus")


def test_a_manifest_from_process_substitution_is_an_error_that_says_so(tmp_path: Path) -> None:
    program = "import sys, nestdata; nestdata.prepare_corpus([sys.argv[1]], sys.argv[2])"
    script = '"$0" -c "$1" <(cat) "$2"'
    command = ["bash", "-c", script, sys.executable, program, str(tmp_path / "speech.corpus")]
    errors = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    last_line = errors.stderr.splitlines()[-1]
    assert errors.returncode == 1
    assert last_line.startswith("nestdata.errors.ManifestError: /dev/fd/")
    assert "a pipe, not a file" in last_line
    assert "process substitution" in last_line
