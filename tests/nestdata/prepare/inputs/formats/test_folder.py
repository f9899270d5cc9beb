import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestdata import Corpus, ManifestError, prepare_corpus
from nestdata.prepare.inputs import Entry
from nestdata.prepare.inputs.audio import File
from tests.nestdata.prepare.inputs.reading import entries_of, prepared, some_audio, source_of
from tests.synthesis import read_audio


def ids_of(folder: Path) -> list[str]:
    return [entry.cut_id for entry in entries_of(folder)]


def test_files_are_sorted_by_name_and_come_before_those_of_subfolders(tmp_path: Path) -> None:
    for name in ("b.wav", "a.FLAC", "Z.Mp3", "sub/c.ogg", "sub/deep/d.opus", "a/e.m4a", "notes.txt", "wav", ".wav"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "f.wav").mkdir()
    assert ids_of(tmp_path) == [".wav", "Z", "a", "b", "a/e", "sub/c", "sub/deep/d"]


def test_the_position_of_an_entry_is_the_path_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "a.wav").touch()
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "x" / "y" / "a.wav")
    assert entries_of(Path("x")) == [Entry(where=path, cut_id="y/a", audio=File(path))]


def test_a_second_file_with_the_same_stem_is_rejected_as_a_duplicate_with_its_number(tmp_path: Path) -> None:
    for name in ("a.flac", "a.wav", "b.wav"):
        some_audio(tmp_path / "audio" / name)
    cuts, (reject,) = prepared(tmp_path / "audio")
    assert sorted(cuts) == ["a", "b"]
    assert (reject["reason"], reject["where"]) == ("duplicate_id", f"{tmp_path}/audio (file 2)")
    assert cuts["a"]["recording"]["sources"][0]["source"].endswith("a.flac")


def test_ids_of_folders_with_the_same_layout_do_not_collide(tmp_path: Path) -> None:
    for language in ("en", "fr"):
        some_audio(tmp_path / language / "wavs" / "0.wav")
    prepare_corpus([tmp_path / "en", tmp_path / "fr"], tmp_path / "speech.corpus")
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert [corpus[row].id for row in range(2)] == ["en/wavs/0", "fr/wavs/0"]


def test_symbolic_links_are_followed_but_no_folder_is_read_twice(tmp_path: Path) -> None:
    folder = tmp_path / "audio"
    for name in ("a.wav", "deep/b.wav"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.wav").touch()
    (folder / "up").symlink_to(folder)
    (folder / "deep" / "upper").symlink_to(tmp_path)
    (folder / "again").symlink_to(folder / "deep")
    (folder / "self").symlink_to(folder / "self")
    (folder / "file.wav").symlink_to(folder / "a.wav")
    assert ids_of(folder) == ["a", "file", "again/b", "again/upper/elsewhere/c"]


def test_a_broken_symbolic_link_is_rejected_as_missing(tmp_path: Path) -> None:
    some_audio(tmp_path / "audio" / "a.wav")
    (tmp_path / "audio" / "b.wav").symlink_to(tmp_path / "gone.wav")
    (tmp_path / "audio" / "c.wav").symlink_to(tmp_path / "audio" / "c.wav")
    cuts, rejects = prepared(tmp_path / "audio")
    assert list(cuts) == ["a"]
    assert [(reject["cut_id"], reject["reason"]) for reject in rejects] == [("b", "missing"), ("c", "missing")]


def test_only_the_file_with_a_name_that_is_not_unicode_is_rejected(tmp_path: Path) -> None:
    some_audio(tmp_path / "audio" / "a.wav")
    some_audio(tmp_path / "audio" / "b.wav").rename(tmp_path / "audio" / "b\udcff.wav")
    some_audio(tmp_path / "audio" / "ü 你.wav")
    cuts, (reject,) = prepared(tmp_path / "audio")
    assert (sorted(cuts), reject["reason"]) == (["a", "ü 你"], "unreadable")
    assert "not Unicode" in reject["detail"]


def test_samples_of_a_prepared_folder_equal_the_file(tmp_path: Path) -> None:
    path = some_audio(tmp_path / "audio" / "deep" / "a.flac")
    cuts, rejects = prepared(tmp_path / "audio")
    assert (list(cuts), cuts["deep/a"]["supervisions"], rejects) == (["deep/a"], [], [])
    np.testing.assert_array_equal(Corpus.open(tmp_path / "audio.corpus").load(0)[1], read_audio(path))


def test_a_folder_without_audio_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "notes.txt").touch()
    with pytest.raises(ManifestError, match=r"no audio in this folder .* 1 of other kinds \(1 \.txt\)"):
        entries_of(tmp_path)


def test_a_path_that_is_not_a_folder_is_an_error_if_the_format_is_folder(tmp_path: Path) -> None:
    (tmp_path / "m.json").touch()
    for name, message in (("m.json", "a file, but --format folder reads a folder"), ("gone", "no such folder")):
        with pytest.raises(ManifestError, match=rf"{name}: {message}"):
            source_of(tmp_path / name, "folder")


def test_a_folder_without_read_permission_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates the error, because root may read every folder."""
    (tmp_path / "a" / "secret").mkdir(parents=True)
    scandir = os.scandir

    def refuse(path: str) -> Iterator[Any]:
        if path.endswith("secret"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        ManifestError, match=r"a/secret: cannot be listed \(Permission denied\)\. Grant read permission, or move"
    ):
        entries_of(tmp_path)
