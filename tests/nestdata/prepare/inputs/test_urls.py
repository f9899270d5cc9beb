"""Locations of inputs at URLs, as far as they can be tested without a store; `tests/remote` has the rest."""

import os
import sys
from pathlib import Path

import pytest

from nestdata import ConfigError, ManifestError, OutputError, prepare_corpus
from nestdata.prepare.inputs.entry import cut_id_of, relative_id, resolve
from nestdata.prepare.inputs.formats.detect import common_root
from nestdata.prepare.inputs.formats.fairseq import fairseq_folder, is_fairseq
from nestdata.prepare.inputs.formats.folder import AudioFolder, sorted_as_files
from nestdata.prepare.inputs.formats.huggingface import parquet_folder
from nestdata.storage import ObjectInfo
from nestdata.storage.clients import import_obstore
from tests.nestdata.prepare.inputs.reading import entries_of
from tests.synthesis import write_jsonl


@pytest.mark.parametrize(
    ("directory", "name", "location"),
    [
        ("s3://bucket/set", "wavs/a.flac", "s3://bucket/set/wavs/a.flac"),
        ("s3://bucket", "a b%20ü.flac", "s3://bucket/a b%20ü.flac"),
        ("s3://bucket/set/lists", "../wavs/./a.flac", "s3://bucket/set/wavs/a.flac"),
        ("s3://bucket/set", "../../../a.flac", "s3://bucket/a.flac"),
        ("s3://bucket/set", "gs://other/a.flac", "gs://other/a.flac"),
        ("s3://bucket/set", "/data/a.flac", "/data/a.flac"),
        ("/data/set", "https://host/a%20b.flac", "https://host/a%20b.flac"),
        ("https://host/set", "wavs/a b.flac", "https://host/set/wavs/a%20b.flac"),
    ],
)
def test_names_are_relative_to_the_folder_of_the_manifest(directory: str, name: str, location: str) -> None:
    assert resolve(directory, name) == location


@pytest.mark.parametrize(
    ("location", "root", "cut_id"),
    [
        ("s3://bucket/set/wavs/a.flac", "s3://bucket/set", "wavs/a"),
        ("s3://bucket/set/wavs/a.flac", "s3://bucket", "set/wavs/a"),
        ("s3://bucket2/a.flac", "s3://bucket", "s3://bucket2/a"),
        ("/data/a.flac", "", "/data/a"),
        ("s3://bucket/a.flac", "", "s3://bucket/a"),
    ],
)
def test_ids_are_relative_to_the_root(location: str, root: str, cut_id: str) -> None:
    assert cut_id_of(location, root) == cut_id


@pytest.mark.parametrize(
    ("cut_id", "root", "expected"),
    [
        ("/data/wavs/a", "/data/lists", "../wavs/a"),
        ("s3://bucket/wavs/a", "s3://bucket/lists", "../wavs/a"),
        ("s3://bucket/wavs/a", "s3://other/lists", "s3://bucket/wavs/a"),
        ("gs://bucket/a", "s3://bucket", "gs://bucket/a"),
        ("s3://bucket/a", "/data", "s3://bucket/a"),
        ("/data/a", "", "/data/a"),
    ],
)
def test_ids_outside_of_the_root_are_relative_to_it_if_they_are_in_one_place(
    cut_id: str, root: str, expected: str
) -> None:
    assert relative_id(cut_id, root) == expected


def test_lines_of_a_local_manifest_may_be_urls(tmp_path: Path) -> None:
    rows = [{"audio_filepath": "s3://bucket/a.flac"}, {"audio_filepath": "b.flac", "offset": 1.0}]
    entries = entries_of(write_jsonl(tmp_path / "m.json", rows))
    assert [(entry.audio.location, entry.cut_id) for entry in entries] == [
        ("s3://bucket/a.flac", "s3://bucket/a"),
        (f"{tmp_path}/b.flac", "b@1.000"),
    ]


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
        ("s3://bucket/lists/train.tsv", b"./\n", "s3://bucket/lists"),
        ("s3://bucket/lists/train.tsv", b"gs://other/wavs/\n", "gs://other/wavs"),
        ("s3://bucket/lists/train.tsv", b"/data/wavs\n", "/data/wavs"),
        (Path("/data/train.tsv"), b"s3://bucket/wavs\r\n", "s3://bucket/wavs"),
    ],
)
def test_the_folder_of_a_fairseq_manifest_may_be_a_url(manifest: Path | str, line: bytes, folder: str) -> None:
    assert is_fairseq(manifest, line)
    assert fairseq_folder(manifest, line) == folder


def test_objects_of_a_bucket_are_in_the_order_of_the_same_files_on_disk(tmp_path: Path) -> None:
    names = ["b.wav", "a/z.wav", "a/b/c.wav", "a.wav", "a/a.wav", "B.wav", "a-b/c.wav", "a b/c.wav", "é.wav"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files = [os.path.relpath(path, tmp_path) for path in AudioFolder(tmp_path, str(tmp_path)).items()]
    objects = sorted_as_files([ObjectInfo(f"s3://bucket/{name}", 1, None) for name in sorted(names)])
    assert [info.location.removeprefix("s3://bucket/") for info in objects] == files


def test_relative_paths_in_parquet_files_start_from_their_folder() -> None:
    for pattern in (
        "s3://bucket/data/a.parquet",
        "s3://bucket/data/*.parquet",
        "s3://bucket/data/",
        "s3://bucket/data",
    ):
        assert parquet_folder(pattern) == "s3://bucket/data"


@pytest.mark.parametrize("output", ["s3://bucket/a.corpus", Path("s3://bucket/a.corpus")])
def test_a_corpus_is_not_written_to_a_url(tmp_path: Path, output: Path | str) -> None:
    with pytest.raises(OutputError, match=r"a\.corpus: a corpus directory is written to a local path, not to a URL"):
        prepare_corpus([tmp_path], output)


def test_a_url_given_as_a_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="give URLs as str"):
        prepare_corpus([Path("s3://bucket/m.json")], tmp_path / "a.corpus")


def test_a_url_without_the_extra_remote_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    import_obstore.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'nest-pretrain\[remote\]'"):
        prepare_corpus(["s3://bucket-without-extra/m.json"], tmp_path / "a.corpus")
    assert list(tmp_path.iterdir()) == []
