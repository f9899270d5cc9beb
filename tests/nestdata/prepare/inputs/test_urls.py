"""Locations of inputs at URLs, as far as they can be tested without a store; `tests/remote` has the rest."""

import sys
from pathlib import Path

import pytest

from nestdata import ConfigError, OutputError, prepare_corpus
from nestdata.prepare.inputs.entry import relative_id, resolve
from nestdata.prepare.inputs.formats.detect import common_root
from nestdata.prepare.inputs.formats.fairseq import fairseq_folder, is_fairseq
from nestdata.storage.clients import import_obstore


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
def test_names_are_relative_to_the_folder_of_the_manifest(directory: str, name: str, location: str) -> None:
    assert resolve(directory, name) == location


@pytest.mark.parametrize(
    ("cut_id", "root", "expected"),
    [
        ("/data/wavs/a", "/data/lists", "../wavs/a"),
        ("s3://bucket/wavs/a", "s3://bucket/lists", "../wavs/a"),
        ("s3://bucket/wavs/a", "s3://other/lists", "s3://bucket/wavs/a"),
    ],
)
def test_ids_outside_of_the_root_are_relative_to_it_if_they_are_in_one_place(
    cut_id: str, root: str, expected: str
) -> None:
    assert relative_id(cut_id, root) == expected


def test_the_root_of_inputs_in_different_places_is_empty() -> None:
    def root_of(*folders: str) -> str:
        return common_root(folders)

    assert root_of("s3://bucket/en/lists", "s3://bucket/en") == "s3://bucket/en"
    assert root_of("s3://bucket/en", "s3://bucket/fr") == "s3://bucket"
    assert root_of("s3://bucket/en", "s3://other/en") == root_of("s3://bucket/en", "/data") == ""
    assert root_of("/data/en", "/data/fr") == "/data"


@pytest.mark.parametrize(
    ("manifest", "line", "folder"),
    [
        ("s3://bucket/lists/train.tsv", b"../wavs\n", "s3://bucket/wavs"),
        ("s3://bucket/lists/train.tsv", b"gs://other/wavs/\n", "gs://other/wavs"),
        (Path("/data/train.tsv"), b"s3://bucket/wavs\r\n", "s3://bucket/wavs"),
    ],
)
def test_the_folder_of_a_fairseq_manifest_may_be_a_url(manifest: Path | str, line: bytes, folder: str) -> None:
    assert is_fairseq(manifest, line)
    assert fairseq_folder(manifest, line) == folder


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
