"""Where the names in manifests start, in every format that has a list of files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nestdata.prepare.inputs.rows import FileNames
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
