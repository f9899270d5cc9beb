"""Where the names in manifests start, in every format that has a list of files, on disk and at URLs."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata import ConfigError, OutputError, prepare_corpus
from nestdata.prepare.inputs.rows import FileNames, cut_id_of, resolve
from nestdata.storage import common_folder
from nestdata.storage.clients import import_obstore
from tests.nestdata.prepare.inputs.reading import entries_of, lhotse_recording, some_audio, source_of
from tests.synthesis import write_jsonl


def nemo(folder: Path, *names: str) -> Path:
    return write_jsonl(folder / "m.json", [{"audio_filepath": name} for name in names])


def lhotse(folder: Path, *names: str) -> Path:
    return write_jsonl(folder / "recordings.jsonl", [lhotse_recording(name, name) for name in names])


def lines(file: str, line: str, header: str = "") -> Callable[..., Path]:
    def write(folder: Path, *names: str) -> Path:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header + "".join(line.format(name=name) for name in names))
        return path.parent if file == "kaldi/wav.scp" else path

    return write


WRITERS = {
    "nemo": nemo,
    "lhotse": lhotse,
    "csv": lines("m.csv", "{name},x\n", "path,text\n"),
    "list": lines("m.txt", "{name}\n"),
    "kaldi": lines("kaldi/wav.scp", "{name} {name}\n"),
}
# Kaldi and Lhotse take names from the current directory, and it wins if a file is there and beside the manifest.
CURRENT_FIRST = ("kaldi", "lhotse")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a manifest, beside the current directory and the home directory; each has files of its own."""
    for name in ("lists", "lists/kaldi", "here", "home"):
        some_audio(tmp_path / name / "both.wav")
        some_audio(tmp_path / name / f"{name.replace('/', '-')}.wav")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "lists"


@pytest.mark.parametrize("form", WRITERS)
def test_each_name_is_looked_up_beside_the_manifest_in_the_current_directory_and_at_home(
    folder: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "lists-kaldi" if form == "kaldi" else "lists"
    names = ["gone.wav", "here.wav", f"{own}.wav", "both.wav", "~/home.wav", "~/gone.wav", "s3://b/~/a.wav"]
    path = WRITERS[form](folder, *names)
    source = source_of(path)
    items = list(source.items())
    monkeypatch.chdir("/")  # a worker may run elsewhere, and as another user
    monkeypatch.setenv("HOME", "/nowhere")
    entries = [entry for number, item in enumerate(items, start=1) for entry in source.entries(number, item)]
    here, home, beside = str(folder.parent / "here"), str(folder.parent / "home"), str(folder)
    beside += "/kaldi" if form == "kaldi" else ""
    assert [entry.audio.location for entry in entries] == [
        f"{here}/gone.wav",  # as the first name that exists
        f"{here}/here.wav",
        f"{beside}/{own}.wav",
        f"{here if form in CURRENT_FIRST else beside}/both.wav",
        f"{home}/home.wav",
        f"{home}/gone.wav",
        "s3://b/~/a.wav",
    ]


def test_ids_of_names_in_the_current_directory_are_those_of_a_table(folder: Path) -> None:
    for names in (["here.wav", "both.wav"], ["gone.wav", "here.wav", "lists.wav"]):
        ids = [
            [entry.cut_id for entry in entries_of(WRITERS[form](folder, *names))] for form in ("nemo", "csv", "list")
        ]
        assert ids[0] == ids[1] == ids[2]
        assert ids[0][0] == ("here" if names[0] == "here.wav" else "gone")


@pytest.mark.usefixtures("folder")
def test_names_at_a_url_start_from_its_folder_only() -> None:
    names = FileNames(("s3://bucket/lists",), "s3://bucket/lists")
    assert [names.file(name).location for name in ("both.wav", "~/home.wav", "../a.wav")] == [
        "s3://bucket/lists/both.wav", "s3://bucket/lists/~/home.wav", "s3://bucket/a.wav",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "root", "cut_id"),
    [
        ("/data/wavs/a.wav", "/data", "wavs/a"),
        ("/data/wavs/a.b.wav", "/data/wavs", "a.b"),
        ("/data2/a.wav", "/data", "/data2/a"),
    ],
)
def test_an_id_is_the_path_relative_to_the_root_without_its_suffix(file: str, root: str, cut_id: str) -> None:
    assert cut_id_of(file, root) == cut_id


_words = st.sampled_from(["a", "b c", ".", "..", ".hidden", "ü", "x.wav", "a..b", "\udcff"])


@given(st.lists(_words, max_size=3), st.lists(_words, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_a_resolved_path_is_absolute_and_normalised(
    folders: list[str], words: list[str], is_absolute: bool, doubled: bool
) -> None:
    directory = os.path.normpath("/" + "/".join(folders))
    name = ("/" if is_absolute else "") + ("//" if doubled else "/").join([*words, "a.wav"])
    expected = os.path.normpath(os.path.join(directory, name))
    assert resolve(directory, name) == ("/" + expected.lstrip("/"))


@pytest.mark.parametrize(
    ("directory", "name", "location"),
    [
        ("s3://bucket/set", "wavs/a.flac", "s3://bucket/set/wavs/a.flac"),
        ("s3://bucket/set/lists", "../wavs/./a.flac", "s3://bucket/set/wavs/a.flac"),
        ("s3://bucket/set", "../../../a.flac", "s3://bucket/a.flac"),
        ("s3://bucket/set", "/data/a.flac", "/data/a.flac"),
        ("https://host/set", "wavs/a b.flac", "https://host/set/wavs/a%20b.flac"),
    ],
)
def test_a_name_at_a_url_stays_in_its_bucket(directory: str, name: str, location: str) -> None:
    assert resolve(directory, name) == location


def test_the_root_of_inputs_in_different_places_is_empty() -> None:
    assert common_folder("s3://bucket/en/lists", "s3://bucket/en") == "s3://bucket/en"
    assert common_folder("s3://bucket/en", "s3://bucket/fr") == "s3://bucket"
    assert common_folder("s3://bucket/en", "s3://other/en") == common_folder("s3://bucket/en", "/data") == ""
    assert common_folder("/data/en", "/data/fr") == "/data"


@pytest.mark.parametrize("output", ["s3://bucket/a.corpus", Path("s3://bucket/a.corpus")])
def test_a_corpus_is_not_written_to_a_url(tmp_path: Path, output: Path | str) -> None:
    with pytest.raises(OutputError, match=r"a\.corpus: a corpus directory is written to a local path, not to a URL"):
        prepare_corpus([tmp_path], output)


def test_a_url_without_the_extra_remote_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    import_obstore.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'nest-pretrain\[remote\]'"):
        prepare_corpus(["s3://bucket-without-extra/m.json"], tmp_path / "a.corpus")
    assert list(tmp_path.iterdir()) == []
