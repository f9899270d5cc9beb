"""What `prepare_corpus` accepts as inputs: one or several paths, corpora, and Lhotse's cuts and recordings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lhotse import CutSet, MonoCut, Recording, RecordingSet

from nestdata import Corpus, ManifestError, PrepareConfig, prepare_corpus
from tests.nestdata.prepare.inputs.reading import some_audio
from tests.synthesis import write_jsonl


def ids_of(given: Any, output: Path, **config: Any) -> list[str]:
    prepare_corpus(given, output, PrepareConfig(report_samples=0, **config))
    corpus = Corpus.open(output)
    return [corpus.line(index)["id"] for index in corpus.input_order().tolist()]


@pytest.fixture
def audio(tmp_path: Path) -> Path:
    for name in ("b.wav", "a.flac", "deep/c.mp3"):
        some_audio(tmp_path / "audio" / name)
    return tmp_path / "audio"


def test_one_audio_file_is_an_input(audio: Path, tmp_path: Path) -> None:
    for number, path in enumerate([audio / "b.wav", str(audio / "b.wav"), [audio / "b.wav"]]):
        assert ids_of(path, tmp_path / f"{number}.corpus") == ["b"]


def test_audio_files_have_ids_relative_to_their_common_folder(audio: Path, tmp_path: Path) -> None:
    files = (audio / name for name in ("b.wav", "deep/c.mp3", "a.flac"))
    assert ids_of(files, tmp_path / "x.corpus") == ["b", "deep/c", "a"]
    write_jsonl(audio / "m.json", [{"audio_filepath": "a.flac"}])
    mixed = [audio / "b.wav", audio / "m.json", str(audio / "deep" / "c.mp3")]
    assert ids_of(mixed, tmp_path / "mixed.corpus") == ["b", "a", "deep/c"]


def test_a_file_that_is_no_audio_is_rejected_and_one_that_is_missing_is_an_error(audio: Path, tmp_path: Path) -> None:
    (audio / "bad.wav").write_bytes(b"RIFF")
    with pytest.raises(
        ManifestError, match=r"bad\.wav: no usable cut among 1 entries \(1 unreadable\); the first: .*unreadable"
    ):
        prepare_corpus(audio / "bad.wav", tmp_path / "x.corpus")
    with pytest.raises(ManifestError, match=r"gone\.wav: does not exist"):
        prepare_corpus([audio / "a.flac", audio / "gone.wav"], tmp_path / "x.corpus")
    (audio / "link.wav").symlink_to("annex.wav")
    with pytest.raises(ManifestError, match=r"link\.wav: is a symbolic link to annex\.wav, which does not exist"):
        prepare_corpus(audio / "link.wav", tmp_path / "x.corpus")


def test_a_cut_set_and_a_recording_set_are_inputs(audio: Path, tmp_path: Path) -> None:
    recordings = RecordingSet.from_recordings(Recording.from_file(audio / name) for name in ("b.wav", "a.flac"))
    cuts = CutSet.from_cuts(
        MonoCut(f"cut-{recording.id}", start=0.1, duration=0.2, channel=0, recording=recording)
        for recording in recordings
    )
    assert ids_of(recordings, tmp_path / "r.corpus") == ["b", "a"]
    assert ids_of(cuts, tmp_path / "c.corpus") == ["cut-b", "cut-a"]
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    lazy = CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl.gz")
    both = [lazy, str(audio / "deep")]
    assert ids_of(both, tmp_path / "l.corpus") == ["cut-b", "cut-a", "c"]
    saved = Corpus.open(tmp_path / "c.corpus")
    assert saved.fingerprint != Corpus.open(tmp_path / "l.corpus").fingerprint
    assert ids_of(tmp_path / "cuts.jsonl.gz", tmp_path / "f.corpus") == ["cut-b", "cut-a"]
    assert saved.fingerprint == Corpus.open(tmp_path / "f.corpus").fingerprint


def test_cuts_in_memory_that_are_no_mono_cuts_are_an_error_with_their_number(audio: Path, tmp_path: Path) -> None:
    cut = Recording.from_file(audio / "b.wav").to_cut()
    mixed = cut.pad(duration=1.0)
    with pytest.raises(ManifestError, match="CutSet:2: a MixedCut where a MonoCut was expected"):
        prepare_corpus(CutSet.from_cuts([cut, mixed.with_id("mixed")]), tmp_path / "x.corpus")
    in_memory = Recording.from_bytes((audio / "b.wav").read_bytes(), "b").to_cut()
    with pytest.raises(ManifestError, match="CutSet:1: a source of type 'memory', which is not supported"):
        prepare_corpus(CutSet.from_cuts([in_memory]), tmp_path / "x.corpus")


def test_a_corpus_is_an_input_by_path_or_object(audio: Path, tmp_path: Path) -> None:
    first = prepare_corpus(audio, tmp_path / "first.corpus").path
    assert (first / "report").is_dir()  # its audio is not taken for that of a folder
    for number, given in enumerate([first, Corpus.open(first), [str(first)]]):
        assert ids_of(given, tmp_path / f"again-{number}.corpus") == ["a", "b", "deep/c"]
        assert Corpus.open(tmp_path / f"again-{number}.corpus").fingerprint == Corpus.open(first).fingerprint


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, r"int where audio was expected \(7\)\. Give a path or URL, a Corpus, a CutSet or RecordingSet of Lhotse"),
        (np.zeros(3), "ndarray where audio was expected"),
        ([], "no input was given"),
        ("", "an empty path was given"),
    ],
)
def test_anything_else_is_an_error_that_says_what_is_expected(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        prepare_corpus(given, tmp_path / "x.corpus")
    assert list(tmp_path.iterdir()) == []
