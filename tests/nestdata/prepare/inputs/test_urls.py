"""Locations of inputs at URLs, as far as they can be tested without a store; `tests/remote` has the rest."""

import sys
from pathlib import Path

import pytest

from nestdata import ConfigError, OutputError, prepare_corpus
from nestdata.prepare.inputs.rows import resolve
from nestdata.storage import common_folder
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


def test_the_common_folder_of_different_places_is_empty() -> None:
    assert common_folder("s3://bucket/en/lists", "s3://bucket/en") == "s3://bucket/en"
    assert common_folder("s3://bucket/en", "s3://bucket/fr") == "s3://bucket"
    assert common_folder("s3://bucket/en", "s3://other/en") == common_folder("s3://bucket/en", "/data") == ""
    assert common_folder("/data/en", "/data/fr") == "/data"


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
