import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata import ManifestError
from nestdata.prepare.inputs.entry import cut_id_of, resolve
from nestdata.prepare.inputs.lines import count_lines, open_lines

_LINES = b"".join(b"line %d\n" % i for i in range(500))


def lines_of(path: Path) -> list[bytes]:
    with open_lines(path) as file:
        return list(file)


@pytest.mark.parametrize("name", ["m.json", "m.json.gz"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines_of_plain_and_compressed_files_are_read_without_the_byte_order_mark(
    tmp_path: Path, name: str, mark: bytes
) -> None:
    content = mark + b"one\r\n\ntwo\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert lines_of(tmp_path / name) == [b"one\r\n", b"\n", b"two\n"]


@pytest.mark.parametrize("content", [b"", b"a", b"\xef\xbb"])
def test_a_file_shorter_than_a_byte_order_mark_is_read_completely(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.json").write_bytes(content)
    assert b"".join(lines_of(tmp_path / "m.json")) == content


def test_count_lines_counts_plain_and_compressed_lines(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_bytes(_LINES)
    (tmp_path / "m.json.gz").write_bytes(gzip.compress(_LINES))
    assert [count_lines(tmp_path / name) for name in ("m.json", "m.json.gz")] == [500, 500]


@pytest.mark.parametrize("damage", ["truncated", "not compressed", "flipped"])
def test_a_damaged_compressed_file_is_an_error(tmp_path: Path, damage: str) -> None:
    packed = gzip.compress(_LINES)
    middle = len(packed) // 2
    content = {
        "truncated": packed[:-20],
        "not compressed": _LINES,
        "flipped": packed[:middle] + bytes(byte ^ 0xFF for byte in packed[middle:]),
    }
    (tmp_path / "m.json.gz").write_bytes(content[damage])
    with pytest.raises(ManifestError, match=r"m\.json\.gz: cannot be read \(.+\)\. Check the file and copy it again"):
        lines_of(tmp_path / "m.json.gz")
    with pytest.raises(ManifestError, match=r"m\.json\.gz: cannot be read"):
        count_lines(tmp_path / "m.json.gz")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.json", r"gone\.json: no such file or folder\. Check the path\."),
        ("folder", "folder: a folder where a file was expected"),
    ],
)
def test_opening_anything_but_a_file_is_an_error_that_says_what_it_is(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ManifestError, match=message):
        lines_of(tmp_path / name)


@pytest.mark.parametrize(
    ("file", "root", "cut_id"),
    [
        ("/data/wavs/a.wav", "/data", "wavs/a"),
        ("/data/wavs/a.b.wav", "/data/wavs", "a.b"),
        ("/data/wavs/a", "/data", "wavs/a"),
        ("/data2/a.wav", "/data", "/data2/a"),
        ("/a.wav", "/", "a"),
        ("/data/.wav", "/data", ".wav"),
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
