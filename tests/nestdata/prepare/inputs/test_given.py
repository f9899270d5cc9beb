"""What `prepare_corpus` accepts: one or several paths as people paste them, corpora, and Lhotse's objects."""

import shutil
import unicodedata
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lhotse import CutSet, MonoCut, Recording, RecordingSet

from nestdata import Corpus, ManifestError, PrepareConfig, prepare_corpus
from nestdata.prepare.inputs.format import audio_inputs
from tests.nestdata.prepare.inputs.reading import format_of, prepared, some_audio
from tests.nestdata.prepare.inputs.shards import write_tar
from tests.synthesis import hiss, read_jsonl, write_audio, write_jsonl


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{0}/a.json,{0}/b.json", ["a.json", "b.json"]),
        ("[{0}/a.json,{0}/b.json]", ["a.json", "b.json"]),
        ("[[{0}/a.json],[{0}/b.json]]", ["a.json", "b.json"]),
        ("['{0}/a.json', '{0}/b.json']", ["a.json", "b.json"]),
        ("{0}/a,b.json", ["a,b.json"]),
        ("{0}/[0-9][0-9].json", ["[0-9][0-9].json"]),
        ("{0}/x_{{0,1}}.json", ["x_{{0,1}}.json"]),
        ("{0}/a.json,{0}/none.json", ["a.json,{0}/none.json"]),
    ],
)
def test_several_manifests_in_one_text_are_several_inputs(tmp_path: Path, text: str, expected: list[str]) -> None:
    for name in ("a.json", "b.json", "a,b.json", "x_0.json"):
        (tmp_path / name).touch()
    found = audio_inputs(text.format(tmp_path))
    assert [str(path) for path in found] == [f"{tmp_path}/{name.format(tmp_path)}" for name in expected]


def test_urls_in_one_text_are_several_inputs() -> None:
    assert audio_inputs("s3://b/a.json,s3://b/c.json") == ["s3://b/a.json", "s3://b/c.json"]
    assert audio_inputs("s3://b/a,c.json") == ["s3://b/a,c.json"]


@pytest.mark.parametrize("name", ["input_cfg.yaml", "x.YML", "cuts.yaml.gz"])
def test_a_configuration_is_an_error_that_says_what_to_give(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("- type: nemo\n  manifest_filepath: a.json\n")
    with pytest.raises(ManifestError, match=r"a configuration, .* as an argument of its own"):
        prepare_corpus(tmp_path / name, tmp_path / "c.corpus")


def test_urls_of_a_list_are_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("https://h/a.wav?download=true\n")
    with pytest.raises(ManifestError, match=r"a\.txt: no usable cut among 1 entries \(1 invalid_url\)"):
        prepare_corpus(tmp_path / "a.txt", tmp_path / "c.corpus")


def test_a_file_of_any_suffix_is_what_it_holds(tmp_path: Path) -> None:
    audio = write_audio(tmp_path / "a.flac", hiss(16000, 1))
    for name in ("recording", "recording.bin", "recording.17"):
        shutil.copyfile(audio, tmp_path / name)
        assert format_of(tmp_path / name) == "audio"
        assert len(prepared(tmp_path / name)[0]) == 1
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.write(audio)
    with pytest.raises(ManifestError, match=r"not_audio, .*a\.zip is a zip archive: unpack it"):
        prepare_corpus(tmp_path / "a.zip", tmp_path / "c.corpus")


@pytest.mark.parametrize("written", ["NFC", "NFD"])
@pytest.mark.parametrize("form", ["json", "csv", "txt", "tar", "lhotse"])
def test_names_in_another_unicode_form_are_found(tmp_path: Path, form: str, written: str) -> None:
    other = "NFD" if written == "NFC" else "NFC"
    on_disk, named = (unicodedata.normalize(kind, "Grüße/café.wav") for kind in (written, other))  # type: ignore[arg-type]
    path = write_audio(tmp_path / on_disk, hiss(16000, 1))
    options = {}
    if form == "json":
        manifest = write_jsonl(tmp_path / "m.json", [{"audio_filepath": named}])
    elif form == "tar":
        write_tar(tmp_path / "audio_0.tar", [(on_disk, path.read_bytes())])
        manifest = write_jsonl(tmp_path / "m.json", [{"audio_filepath": named, "shard_id": 0, "duration": 1.0}])
        options["format"] = "nemo"
    elif form == "lhotse":
        row = Recording.from_file(path, recording_id="café").to_dict()
        row["sources"][0]["source"] = str(tmp_path / named)
        manifest = write_jsonl(tmp_path / "m.jsonl", [row])
    else:
        manifest = tmp_path / f"m.{form}"
        manifest.write_text(f"path,text\n{named},x\n" if form == "csv" else f"{named}\n")
    prepare_corpus(manifest, tmp_path / "c.corpus")
    assert Corpus.open(tmp_path / "c.corpus").load(0)[1].shape == (16000,)


def test_outputs_of_this_program_inside_a_folder_are_left_out_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "talks"
    for name in ("a", "b"):
        write_audio(folder / f"{name}.wav", hiss(16000, 1))
    prepare_corpus(folder, folder / "talks.corpus")
    preview, features = folder / "sub" / "preview", folder / "features"
    for path in (preview / "00_noisy.wav", features / "x.wav", folder / "mine" / "c.wav"):
        write_audio(path, hiss(16000, 2))
    for path in (preview / "index.html", preview / "batch.json", features / "meta.json", features / "index.jsonl"):
        path.touch()
    (folder / "mine" / "meta.json").write_text("{}")  # a folder of the user's
    report = prepare_corpus(folder, folder / "talks.corpus", overwrite=True)
    assert sorted(cut["id"] for cut in read_jsonl(report.path / "cuts.jsonl")) == ["a", "b", "mine/c"]
    (line,) = [note for note in report.notes if note.startswith("left out")]
    assert all(str(path) in line for path in (preview, features, folder / "talks.corpus"))
    # A folder that is given itself is read.
    prepare_corpus(preview, tmp_path / "noisy.corpus")
    assert len(Corpus.open(tmp_path / "noisy.corpus")) == 1


def test_lazy_sets_of_cuts_are_read(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", hiss(64000, 1))
    cuts = CutSet.from_cuts([Recording.from_file(tmp_path / "a.wav").to_cut()])
    cuts.to_file(tmp_path / "cuts.jsonl")
    lazy = CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl").filter(lambda cut: cut.duration > 1)
    assert prepare_corpus(lazy, tmp_path / "c.corpus").num_cuts == 1
    windows = CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl").cut_into_windows(1.0)
    assert prepare_corpus(windows, tmp_path / "w.corpus").num_cuts == 4
    assert [Corpus.open(tmp_path / "w.corpus").num_samples_of(index) for index in range(4)] == [16000] * 4
