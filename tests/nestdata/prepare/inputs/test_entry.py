import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata import ManifestError
from nestdata.prepare.inputs.lines import Manifest
from nestdata.prepare.inputs.rows import cut_id_of, resolve

_LINES = b"".join(b"line %d\n" % i for i in range(500))


def lines_of(path: Path) -> list[bytes]:
    return list(Manifest(path).lines())


@pytest.mark.parametrize("name", ["m.json", "m.json.gz"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines_of_plain_and_compressed_files_are_read_without_the_byte_order_mark(
    tmp_path: Path, name: str, mark: bytes
) -> None:
    content = mark + b"one\r\n\ntwo\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert lines_of(tmp_path / name) == [b"one\r\n", b"\n", b"two\n"]


@pytest.mark.parametrize("damage", ["truncated", "not compressed"])
def test_a_damaged_compressed_file_is_an_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / "m.json.gz").write_bytes(gzip.compress(_LINES)[:-20] if damage == "truncated" else _LINES)
    with pytest.raises(ManifestError, match=r"m\.json\.gz: cannot be read \(.+\)\. Check the file and copy it again"):
        lines_of(tmp_path / "m.json.gz")
    with pytest.raises(ManifestError, match=r"m\.json\.gz: cannot be read"):
        Manifest(tmp_path / "m.json.gz").count()


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
