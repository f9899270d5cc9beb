from pathlib import Path

import pytest

from nestdata import ManifestError
from nestdata.prepare.inputs.entry import Entry, File
from tests.nestdata.prepare.inputs.reading import entries_of


def test_a_line_is_a_path_relative_to_the_folder_on_the_first_line_and_a_number_of_samples(tmp_path: Path) -> None:
    manifest = tmp_path / "train.tsv"
    manifest.write_bytes(b"\xef\xbb\xbf/data/wavs\r\n\r\nspk 1/a.wav\t16000\r\n \n./b.flac\t 8000 ")
    assert entries_of(manifest) == [
        Entry(where=f"{manifest}:3", cut_id="spk 1/a", audio=File("/data/wavs/spk 1/a.wav"), num_frames=16000),
        Entry(where=f"{manifest}:5", cut_id="b", audio=File("/data/wavs/b.flac"), num_frames=8000),
    ]


@pytest.mark.parametrize("line", [b"a.wav", b"a.wav\t-5", b"a.wav\t" + b"9" * 16])
def test_a_line_that_is_not_a_path_and_a_number_is_an_error_that_names_the_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "train.tsv").write_bytes(b"/data\na.wav\t100\n\n" + line + b"\n")
    message = r"train\.tsv:4: b'.*' is not a path, a tab and a number of samples\. Fix or drop it"
    with pytest.raises(ManifestError, match=message):
        entries_of(tmp_path / "train.tsv")


@pytest.mark.parametrize("first", ["", "\n", "a.wav\t100\n", "client_id\tpath\tsentence\n"])
def test_a_forced_manifest_that_does_not_begin_with_a_folder_is_an_error(tmp_path: Path, first: str) -> None:
    (tmp_path / "train.tsv").write_text(first + ("a.wav\t100\n" if first else ""))
    with pytest.raises(ManifestError, match=r"train\.tsv:1: a fairseq manifest begins with the folder of its files"):
        entries_of(tmp_path / "train.tsv", "fairseq")
