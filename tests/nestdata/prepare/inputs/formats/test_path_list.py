from pathlib import Path

import pytest

from nestdata import ManifestError
from nestdata.prepare.inputs.entry import Entry, File
from tests.nestdata.prepare.inputs.reading import entries_of


def test_a_line_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbfwavs/a b.wav\r\n\n/data/c.flac\n./d.mp3")
    assert entries_of(path) == [
        Entry(where=f"{path}:1", cut_id="wavs/a b", audio=File(f"{tmp_path}/wavs/a b.wav")),
        Entry(where=f"{path}:3", cut_id="/data/c", audio=File("/data/c.flac")),
        Entry(where=f"{path}:4", cut_id="d", audio=File(f"{tmp_path}/d.mp3")),
    ]


def test_null_characters_are_an_error_that_names_their_cause(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"a.wav\0b.wav\0")
    with pytest.raises(ManifestError, match=r"list\.txt:1: a NUL character in the path"):
        entries_of(tmp_path / "list.txt")
