from pathlib import Path

import pytest

from nestdata import ManifestError
from nestdata.prepare.inputs.audio import File
from nestdata.prepare.inputs.entry import Entry
from tests.nestdata.prepare.inputs.reading import entries_of, format_of, prepared, some_audio


def test_a_line_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbfwavs/a b.wav\r\n\n/data/c.flac\n./d.mp3")
    assert entries_of(path) == [
        Entry(where=f"{path}:1", cut_id="wavs/a b", audio=File(f"{tmp_path}/wavs/a b.wav")),
        Entry(where=f"{path}:3", cut_id="/data/c", audio=File("/data/c.flac")),
        Entry(where=f"{path}:4", cut_id="d", audio=File(f"{tmp_path}/d.mp3")),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.txt", "gone.wav\n"),
        ("list", "\n/data/a.FLAC\n"),
        ("list.txt", "a name without suffix\n"),
        ("list.LST", "spk1\n"),
        ("list", "here\n"),
        ("list", "s3://bucket/a.wav\n"),
    ],
)
def test_a_list_is_detected_by_its_first_path_or_its_name(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "here").touch()
    (tmp_path / name).write_text(content)
    assert format_of(tmp_path / name) == "list"


def test_paths_may_start_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_audio(tmp_path / "wavs" / "a.wav")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "train.txt").write_text("gone.wav\nwavs/a.wav\nwavs/a.wav\n")
    monkeypatch.chdir(tmp_path)
    cuts, rejects = prepared(tmp_path / "lists" / "train.txt")
    assert list(cuts) == ["wavs/a"]
    assert [reject["reason"] for reject in rejects] == ["missing", "duplicate_id"]


def test_null_characters_are_an_error_that_names_their_cause(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"a.wav\0b.wav\0")
    with pytest.raises(ManifestError, match=r"list\.txt:1: a NUL character in the path"):
        entries_of(tmp_path / "list.txt")


def test_names_that_are_not_unicode_are_opened(tmp_path: Path) -> None:
    some_audio(tmp_path / "a.wav")
    (tmp_path / "list.txt").write_bytes(b"\xff.wav\na.wav\n")
    assert [entry.audio.location for entry in entries_of(tmp_path / "list.txt")] == [
        f"{tmp_path}/\udcff.wav",
        f"{tmp_path}/a.wav",
    ]
    cuts, rejects = prepared(tmp_path / "list.txt")
    assert (list(cuts), [reject["reason"] for reject in rejects]) == (["a"], ["missing"])
