import gzip
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from nestdata import InputFormat, ManifestError, prepare_corpus
from nestdata.prepare.inputs import Entry, InputOptions, Source, common_root, detect_format, open_source
from tests.nestdata.inputs.reading import entries_of, lhotse_cut, lhotse_recording, prepared, some_audio, source_of
from tests.synthesis import write_jsonl


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"audio_filepath": "a.wav"}, "nemo"),
        ({"text": "x", "audio_filename": "a.wav"}, "nemo"),
        (lhotse_cut(), "lhotse"),
        ({key: value for key, value in lhotse_cut().items() if key != "type"}, "lhotse"),
        (lhotse_recording("a.wav"), "lhotse"),
        ({"type": "MixedCut", "tracks": []}, "lhotse"),
    ],
)
@pytest.mark.parametrize("before", [b"", b"\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_json_lines_are_told_apart_by_the_first_that_is_not_blank(
    tmp_path: Path, row: dict[str, object], form: str, before: bytes
) -> None:
    content = before + write_jsonl(tmp_path / "plain", [row]).read_bytes()
    (tmp_path / "m.any").write_bytes(content)
    (tmp_path / "m.gz").write_bytes(gzip.compress(content))
    assert [detect_format(tmp_path / name) for name in ("m.any", "m.gz")] == [form, form]


@pytest.mark.parametrize("content", ["/nowhere\na.wav\t100\n", "/nowhere\r\n", "\ufeff/nowhere\n"])
def test_a_tsv_is_fairseqs(tmp_path: Path, content: str) -> None:
    (tmp_path / "train.tsv").write_text(content)
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(content.encode()))
    assert [detect_format(tmp_path / name) for name in ("train.tsv", "train.tsv.gz")] == ["fairseq", "fairseq"]


def test_a_file_that_begins_with_a_folder_is_fairseqs_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "wavs").mkdir()
    (tmp_path / "train.txt").write_text("wavs\na.wav\t100\n")
    assert detect_format(tmp_path / "train.txt") == "fairseq"


def test_json_lines_in_a_tsv_are_json_lines(tmp_path: Path) -> None:
    assert detect_format(write_jsonl(tmp_path / "m.tsv", [{"audio_filepath": "a.wav"}])) == "nemo"


def test_directories_are_told_apart_by_the_files_in_them(tmp_path: Path) -> None:
    files = {"kaldi": ["wav.scp", "a.wav"], "huggingface": ["dataset_info.json", "state.json"], "folder": ["a.wav"]}
    for directory, names in files.items():
        (tmp_path / directory).mkdir()
        for name in names:
            (tmp_path / directory / name).touch()
    assert {name: detect_format(tmp_path / name) for name in files} == {name: name for name in files}


def test_a_format_that_is_forced_is_not_looked_for(tmp_path: Path) -> None:
    some_audio(tmp_path / "data" / "a.wav")
    (tmp_path / "data" / "wav.scp").write_text("utterance a.wav\n")
    assert [entry.cut_id for entry in entries_of(tmp_path / "data")] == ["utterance"]
    assert [entry.cut_id for entry in entries_of(tmp_path / "data", "folder")] == ["a"]
    assert list(prepared(tmp_path / "data", format="folder")[0]) == ["a"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.json", b"", r"m\.json: the manifest is empty\. Check the command that wrote it"),
        ("m.json", b"\n\r\n \n", r"m\.json: the manifest is empty"),
        ("m.json", b"\xef\xbb\xbf", r"m\.json: the manifest is empty"),
        ("m.json", b'{"path": "a.wav", "seconds": 1}', r"m\.json:1: neither a NeMo line .* keys are: path, seconds"),
        ("m.json", b"\n{}", r"m\.json:2: neither a NeMo line .* Force a format with --format: nemo, lhotse"),
        ("m.json", b'[{"audio_filepath": "a.wav"}]', r"m\.json:1: list where a JSON object was expected"),
        ("m.yaml", b"- id: cut", r"m\.yaml:1: not JSON .* Other kinds of input: a fairseq manifest"),
        ("m.json", b"\x00\xff\xfe", r"m\.json:1: not JSON"),
        ("m.wav", b"RIFF", r"m\.wav: one audio file\. Give the folder that holds it"),
        ("m.FLAC", b"", r"m\.FLAC: one audio file"),
    ],
)
def test_what_cannot_be_told_is_an_error_that_says_what_was_found(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ManifestError, match=message):
        detect_format(tmp_path / name)


def test_an_input_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    for name in ("gone.json", "gone", "gone.wav"):
        with pytest.raises(ManifestError, match=rf"{name}: no such manifest"):
            prepare_corpus([tmp_path / name], tmp_path / "speech.corpus")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["nemo", "lhotse", "fairseq", "kaldi"])
def test_a_folder_forced_to_be_a_manifest_is_an_error(tmp_path: Path, form: InputFormat) -> None:
    message = "no such manifest" if form == "kaldi" else "a folder where a manifest was expected"
    some_audio(tmp_path / "a.wav")
    with pytest.raises(ManifestError, match=message):
        entries_of(tmp_path, form)


def test_the_root_of_several_inputs_is_the_folder_that_holds_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("en/wavs", "fr/deep", "lists"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lists" / "fr.tsv").write_text("../fr/deep\n")
    (tmp_path / "en" / "m.json").touch()
    monkeypatch.chdir(tmp_path)
    assert common_root([Path("en/m.json")]) == tmp_path / "en"
    assert common_root([Path("en/wavs")]) == tmp_path / "en" / "wavs"
    assert common_root([Path("en/m.json"), tmp_path / "en" / "wavs"]) == tmp_path / "en"
    assert common_root([Path("en/m.json"), Path("fr/deep")]) == tmp_path
    assert common_root([Path("lists/fr.tsv")]) == tmp_path / "fr" / "deep"
    assert common_root([Path("fr"), Path("lists/fr.tsv")]) == tmp_path / "fr"
    assert common_root([Path("fr/gone.json")]) == tmp_path / "fr"


def every_source(directory: Path) -> list[Source]:
    """One source of each kind but Hugging Face's, each with many items."""
    names = [f"{i:03d}.wav" for i in range(200)]
    (directory / "kaldi").mkdir()
    (directory / "audio").mkdir()
    (directory / "kaldi" / "wav.scp").write_text("".join(f"u{name} {name}\n" for name in names))
    (directory / "train.tsv").write_text("audio\n" + "".join(f"{name}\t100\n" for name in names))
    for name in names:
        (directory / "audio" / name).touch()
    nemo = write_jsonl(directory / "nemo.json", [{"audio_filepath": name} for name in names])
    lhotse = write_jsonl(directory / "cuts.jsonl", [lhotse_cut(name) for name in names])
    return [
        source_of(path) for path in (nemo, lhotse, directory / "train.tsv", directory / "kaldi", directory / "audio")
    ]


def test_a_source_stays_small_whatever_it_has_read(tmp_path: Path) -> None:
    for source in every_source(tmp_path):
        assert isinstance(source, Source)
        assert len(list(source.items())) == 200
        assert len(pickle.dumps(source)) < 1500


def test_items_are_counted_where_that_is_cheap(tmp_path: Path) -> None:
    assert [source.count() for source in every_source(tmp_path)] == [200, 200, 200, 200, None]


def test_paths_are_those_of_where_the_source_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process elsewhere, such as a worker of Dask, may work in another directory."""
    sources = every_source(tmp_path)
    monkeypatch.chdir(tmp_path)
    relative = [open_source(Path(source.path.name), InputOptions(root=tmp_path)) for source in sources]
    items = [list(source.items())[:1] for source in relative]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    entries = [source.entry(1, item) for source, (item,) in zip(relative, items, strict=True)]
    assert [path_of(entry) for entry in entries if entry] == [
        str(tmp_path / name) for name in ("000.wav", "a.wav", "audio/000.wav", "kaldi/000.wav", "audio/000.wav")
    ]


def path_of(entry: Entry) -> str:
    return entry.path if entry.cut is None else str(entry.cut["recording"]["sources"][0]["source"])


def test_nothing_but_a_hugging_face_data_set_needs_its_package(tmp_path: Path) -> None:
    some_audio(tmp_path / "audio" / "a.wav")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from nestdata import prepare_corpus\n"
        "prepare_corpus([sys.argv[1]], sys.argv[2])\n"
        "print(sorted({'datasets', 'pandas', 'pyarrow'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "audio"), str(tmp_path / "speech.corpus")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout == "[]\n"
