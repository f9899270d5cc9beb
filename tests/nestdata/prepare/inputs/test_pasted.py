"""Inputs as people paste them, and folders that hold more than audio."""

import shutil
import unicodedata
import zipfile
from pathlib import Path

import pytest

from nestdata import Corpus, ManifestError, prepare_corpus
from nestdata.prepare.inputs.format import audio_inputs
from tests.nestdata.prepare.inputs.reading import format_of, prepared
from tests.nestdata.prepare.inputs.shards import write_tar
from tests.synthesis import hiss, read_jsonl, write_audio, write_jsonl


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
        from lhotse import Recording

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
    from lhotse import CutSet, Recording

    write_audio(tmp_path / "a.wav", hiss(64000, 1))
    cuts = CutSet.from_cuts([Recording.from_file(tmp_path / "a.wav").to_cut()])
    cuts.to_file(tmp_path / "cuts.jsonl")
    lazy = CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl").filter(lambda cut: cut.duration > 1)
    assert prepare_corpus(lazy, tmp_path / "c.corpus").num_cuts == 1
    windows = CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl").cut_into_windows(1.0)
    assert prepare_corpus(windows, tmp_path / "w.corpus").num_cuts == 4
    assert [Corpus.open(tmp_path / "w.corpus").num_samples_of(index) for index in range(4)] == [16000] * 4
