import gzip
from pathlib import Path

import pytest

from nestdata import InputFormat, ManifestError
from tests.nestdata.prepare.inputs.reading import (
    entries_of,
    format_of,
    lhotse_cut,
    lhotse_recording,
    prepared,
    some_audio,
)
from tests.synthesis import write_jsonl


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"audio_filepath": "a.wav"}, "nemo"),
        (lhotse_cut(), "lhotse"),
        (lhotse_recording("a.wav"), "lhotse"),
        ({"type": "MixedCut", "tracks": []}, "lhotse"),
    ],
)
@pytest.mark.parametrize("before", [b"", b"\n \r\n", b"\xef\xbb\xbf\n"])
def test_the_first_line_that_is_not_blank_decides_between_json_formats(
    tmp_path: Path, row: dict[str, object], form: str, before: bytes
) -> None:
    content = before + write_jsonl(tmp_path / "plain", [row]).read_bytes()
    (tmp_path / "m.any").write_bytes(content)
    (tmp_path / "m.gz").write_bytes(gzip.compress(content))
    assert [format_of(tmp_path / name) for name in ("m.any", "m.gz")] == [form, form]


@pytest.mark.parametrize(
    ("form", "content", "names"),
    [
        ("fairseq", "/nowhere\na.wav\t100\n", ["m.tsv"]),
        ("fairseq", "/nowhere\r\n", ["m.tsv"]),
        ("fairseq", "\ufeff/nowhere\n", ["m.tsv"]),
        ("fairseq", "a folder\na.wav\t100\n", ["m.txt", "m.tsv", "m"]),
        ("fairseq", "s3://b/audio\na.wav\t16000\n", ["m"]),
        ("nemo", '{"audio_filepath": "a.wav"}\n', ["m.tsv"]),
        ("csv", "path,text\n", ["m.csv", "m.tsv", "m"]),
        ("csv", "text;file\n", ["m.csv", "m"]),
        ("csv", '"text","audio"\n', ["m.csv", "m"]),
        ("csv", "client_id\tpath\tsentence\n", ["m.csv", "m.tsv", "m"]),
        ("list", "\n/data/a.FLAC\n", ["m"]),
        ("list", "a name without suffix\n", ["m.txt"]),
        ("list", "a file\n", ["m"]),
        ("list", "https://h/a.wav?download=true\n", ["m.txt"]),
        ("list", "https://h/download/17\nhttps://h/download/18\n", ["m"]),
        ("list", "caf\udce9.wav\n", ["m"]),  # Latin-1
    ],
)
def test_the_first_line_of_a_text_decides_its_format(tmp_path: Path, form: str, content: str, names: list[str]) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").touch()
    for name in names:
        (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        assert [format_of(tmp_path / name), format_of(tmp_path / f"{name}.gz")] == [form, form]


def test_the_files_in_a_directory_decide_its_format(tmp_path: Path) -> None:
    files = {"kaldi": ["wav.scp", "a.wav"], "huggingface": ["dataset_info.json", "state.json"], "folder": ["a.wav"]}
    for directory, names in files.items():
        (tmp_path / directory).mkdir()
        for name in names:
            (tmp_path / directory / name).touch()
    (tmp_path / "huggingface" / "state.json").write_text('{"_data_files": []}')
    assert {name: format_of(tmp_path / name) for name in files} == {name: name for name in files}


def test_a_forced_format_is_not_detected(tmp_path: Path) -> None:
    some_audio(tmp_path / "data" / "a.wav")
    (tmp_path / "data" / "wav.scp").write_text("utterance a.wav\n")
    assert [entry.cut_id for entry in entries_of(tmp_path / "data")] == ["utterance"]
    assert [entry.cut_id for entry in entries_of(tmp_path / "data", "folder")] == ["a"]
    assert list(prepared(tmp_path / "data", format="folder")[0]) == ["a"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.json", b"", r"m\.json: the manifest is empty\. Check the command that wrote it"),
        ("m.json", b'{"name": "a.wav", "seconds": 1}', r"m\.json:1: neither a NeMo line .* keys are: name, seconds"),
        (
            "m.json",
            b"\n{}",
            r"m\.json:2: neither a NeMo line .* by --columns audio=KEY, or force a format with --format: parquet",
        ),
        ("m.json", b"[", r"m\.json, object 1: ends here, before the end of its JSON"),
        ("m.json", b'["a.wav"]', r"m\.json, object 1: str where a JSON object was expected.* a list of paths"),
        (
            "m.csv",
            b"name,seconds\n",
            r"m\.csv:1, the header of a table: no audio_filepath among name, seconds\. .*--columns audio=NAME",
        ),
        ("m.csv", b"path,end\n", r"m\.csv:1, the header of a table: end do not give a start and an end"),
        ("m.csv", "path,text\n".encode("utf-16"), r"m\.csv: text in UTF-16\. Save it as UTF-8"),
        ("wav.scp", b"a a.wav\n", r"wav\.scp: a file of a Kaldi directory\. Give the folder"),
    ],
)
def test_an_unknown_format_is_an_error_that_says_what_was_found(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ManifestError, match=message):
        format_of(tmp_path / name)


@pytest.mark.parametrize("form", ["nemo", "kaldi"])
def test_a_folder_is_an_error_if_a_manifest_format_is_forced(tmp_path: Path, form: InputFormat) -> None:
    message = "no wav.scp in this folder" if form == "kaldi" else "a folder where a file was expected"
    some_audio(tmp_path / "a.wav")
    with pytest.raises(ManifestError, match=message):
        entries_of(tmp_path, form)
