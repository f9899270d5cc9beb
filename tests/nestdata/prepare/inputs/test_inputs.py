import gzip
import pickle
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from nestdata import InputFormat, ManifestError, prepare_corpus
from nestdata.prepare.inputs.entry import Source
from nestdata.prepare.inputs.format import GivenInput, InputOptions
from nestdata.prepare.inputs.formats.detect import FORMATS, common_root, detect_format
from tests.nestdata.prepare.inputs.reading import (
    entries_of,
    format_of,
    lhotse_cut,
    lhotse_recording,
    prepared,
    some_audio,
    source_of,
)
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
def test_the_first_line_that_is_not_blank_decides_between_json_formats(
    tmp_path: Path, row: dict[str, object], form: str, before: bytes
) -> None:
    content = before + write_jsonl(tmp_path / "plain", [row]).read_bytes()
    (tmp_path / "m.any").write_bytes(content)
    (tmp_path / "m.gz").write_bytes(gzip.compress(content))
    assert [format_of(tmp_path / name) for name in ("m.any", "m.gz")] == [form, form]


@pytest.mark.parametrize("content", ["/nowhere\na.wav\t100\n", "/nowhere\r\n", "\ufeff/nowhere\n"])
def test_a_tsv_is_a_fairseq_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / "train.tsv").write_text(content)
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(content.encode()))
    assert [format_of(tmp_path / name) for name in ("train.tsv", "train.tsv.gz")] == ["fairseq", "fairseq"]


def test_a_file_that_begins_with_an_existing_folder_is_a_fairseq_manifest(tmp_path: Path) -> None:
    (tmp_path / "wavs").mkdir()
    (tmp_path / "train.txt").write_text("wavs\na.wav\t100\n")
    assert format_of(tmp_path / "train.txt") == "fairseq"


def test_a_tsv_with_json_lines_is_not_a_fairseq_manifest(tmp_path: Path) -> None:
    assert format_of(write_jsonl(tmp_path / "m.tsv", [{"audio_filepath": "a.wav"}])) == "nemo"


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
        ("m.json", b"\n\r\n \n", r"m\.json: the manifest is empty"),
        ("m.json", b"\xef\xbb\xbf", r"m\.json: the manifest is empty"),
        ("m.json", b'{"path": "a.wav", "seconds": 1}', r"m\.json:1: neither a NeMo line .* keys are: path, seconds"),
        ("m.json", b"\n{}", r"m\.json:2: neither a NeMo line .* Force a format with --format: audio, folder"),
        ("m.json", b"[", r"m\.json, object 1: ends here, before the end of its JSON"),
        ("m.json", b"[]", r"m\.json:1: neither a NeMo line"),
        ("m.json", b'["a.wav"]', r"m\.json, object 1: str where a JSON object was expected.* a list of paths"),
        ("m.yaml", b"- id: cut", r"m\.yaml:1: not JSON .* Other kinds of input: an audio file"),
        ("m.json", b"\x00\xff\xfe", r"m\.json:1: not JSON"),
        ("m.csv", b"", r"m\.csv: the manifest is empty"),
        (
            "m.csv",
            b"name,seconds\n",
            r"m\.csv:1: a table without a column of audio files; .* are: name, seconds\. Begin",
        ),
        ("m.csv", b"path,text,Text\n", r"m\.csv:1: two columns are called 'text'"),
        ("m.csv", b"path,start,offset\n", r"m\.csv:1: the columns start, offset do not give a start and an end once"),
        (
            "m.csv",
            b"file,Begin,start\n",
            r"m\.csv:1: the columns Begin, start do not",
        ),
        ("m.csv", b"file,start_s,End\n", r"m\.csv:1: the columns End do not"),
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


def test_an_input_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    for name in ("gone.json", "gone", "gone.wav"):
        with pytest.raises(ManifestError, match=rf"{name}: no such file or folder"):
            prepare_corpus([tmp_path / name], tmp_path / "speech.corpus")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["nemo", "lhotse", "fairseq", "kaldi"])
def test_a_folder_is_an_error_if_a_manifest_format_is_forced(tmp_path: Path, form: InputFormat) -> None:
    message = "no wav.scp in this folder" if form == "kaldi" else "a folder where a file was expected"
    some_audio(tmp_path / "a.wav")
    with pytest.raises(ManifestError, match=message):
        entries_of(tmp_path, form)


def test_the_root_of_several_inputs_is_the_folder_that_holds_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("en/wavs", "fr/deep", "lists"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lists" / "fr.tsv").write_text("../fr/deep\n")
    write_jsonl(tmp_path / "en" / "m.json", [{"audio_filepath": "a.wav"}])
    write_jsonl(tmp_path / "fr" / "cuts.jsonl", [lhotse_cut()])
    monkeypatch.chdir(tmp_path)

    def root_of(*paths: str | Path) -> Path:
        inputs = [GivenInput(Path(path), InputOptions()) for path in paths]
        return Path(common_root(detect_format(given).open(given)[0] for given in inputs))

    assert root_of("en/m.json") == tmp_path / "en"
    assert root_of("en/wavs") == tmp_path / "en" / "wavs"
    assert root_of("en/m.json", tmp_path / "en" / "wavs") == tmp_path / "en"
    assert root_of("en/m.json", "fr/deep") == tmp_path
    assert root_of("lists/fr.tsv") == tmp_path / "fr" / "deep"
    assert root_of("fr", "lists/fr.tsv") == tmp_path / "fr"
    assert root_of("fr/cuts.jsonl") == tmp_path / "fr"


# Opens the inputs of the command line as `prepare` does, reads all their items, and prints how often each file below
# the first argument was opened.
COUNT_OPENS = """
import sys
from collections import Counter
from pathlib import Path
from typing import get_args
from nestdata.prepare.inputs.format import InputOptions
from nestdata.prepare.inputs.formats.detect import open_sources

opens = Counter()
directory = sys.argv[1] + "/"
sys.addaudithook(lambda event, args: opens.update([str(args[0])]) if event == "open" else None)
for source in open_sources([Path(name) for name in sys.argv[2:]], InputOptions()):
    for number, item in enumerate(source.items(), start=1):
        list(source.entries(number, item))
for name, number in sorted(opens.items()):
    if name.startswith(directory):
        print(name.removeprefix(directory), number)
"""


@pytest.mark.slow
def test_a_manifest_is_opened_once_to_detect_its_format_and_once_to_read_it(tmp_path: Path) -> None:
    every_source(tmp_path)
    (tmp_path / "000.wav").touch()  # otherwise, further lines of the NeMo manifest are read to find its folder
    (tmp_path / "segmented").mkdir()
    (tmp_path / "segmented" / "wav.scp").write_text("r1 a.wav\n")
    (tmp_path / "segmented" / "segments").write_text("u1 r1 0 1\n")
    inputs = [tmp_path / name for name in ("nemo.json", "cuts.jsonl", "train.tsv", "kaldi", "segmented", "audio")]
    command = [sys.executable, "-c", COUNT_OPENS, str(tmp_path), *map(str, inputs)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert dict(line.rsplit(" ", 1) for line in printed.splitlines()) == {
        "cuts.jsonl": "2",
        "kaldi/wav.scp": "2",
        "nemo.json": "2",
        "segmented/segments": "1",
        "segmented/wav.scp": "2",
        "train.tsv": "2",
    }


def every_source(directory: Path) -> list[Source]:
    """Returns one source of each format except Hugging Face, each with 200 items."""
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


def test_a_source_is_small_when_pickled_after_it_was_read(tmp_path: Path) -> None:
    for source in every_source(tmp_path):
        assert isinstance(source, Source)
        assert len(list(source.items())) == 200
        assert len(pickle.dumps(source)) < 1500


def test_items_of_manifests_and_folders_are_counted(tmp_path: Path) -> None:
    assert [source.count() for source in every_source(tmp_path)] == [200] * 5


def test_relative_paths_do_not_depend_on_the_current_directory_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of Dask may run in another directory."""
    sources = every_source(tmp_path)
    monkeypatch.chdir(tmp_path)
    relative = [source_of(Path(Path(source.path).name)) for source in sources]
    items = [list(source.items())[:1] for source in relative]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    entries = [entry for source, (item,) in zip(relative, items, strict=True) for entry in source.entries(1, item)]
    assert [entry.audio.location for entry in entries] == [
        str(tmp_path / name) for name in ("000.wav", "a.wav", "audio/000.wav", "kaldi/000.wav", "audio/000.wav")
    ]


def test_a_folder_is_prepared_without_the_packages_for_hugging_face_data_sets(tmp_path: Path) -> None:
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


def test_every_format_can_be_named_and_detected() -> None:
    assert sorted(one.name for one in FORMATS) == sorted(get_args(InputFormat))
