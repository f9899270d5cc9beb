from collections import Counter
from pathlib import Path

import pyarrow
import pytest
import soundfile
from pyarrow import parquet

from nestdata import Corpus, ManifestError, prepare_corpus
from nestdata.prepare.inputs.formats.folder import sorted_as_files
from nestdata.storage import ObjectInfo
from tests.nestdata.prepare.inputs.reading import entries_of, prepared, some_audio
from tests.nestdata.prepare.inputs.shards import write_tar
from tests.nestdata.prepare.parquet_files import write_parquet
from tests.synthesis import hiss, write_audio


def ids_of(folder: Path) -> list[str]:
    return [entry.cut_id for entry in entries_of(folder)]


def test_files_are_sorted_by_kind_and_name_and_come_before_those_of_subfolders(tmp_path: Path) -> None:
    for name in ("b.wav", "a.FLAC", "Z.Mp3", "sub/c.ogg", "sub/deep/d.opus", "a/e.m4a", "notes.txt", "wav", ".wav"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "f.wav").mkdir()
    assert ids_of(tmp_path) == ["a", "b", "Z", "a/e", "sub/c", "sub/deep/d"]


def test_of_files_with_the_same_stem_one_is_divided(tmp_path: Path) -> None:
    for name, num_samples in (("a.mp3", 9000), ("a.wav", 8000), ("b.mp3", 9000), ("b.wav", 0)):
        write_audio(tmp_path / "audio" / name, hiss(num_samples, 1))
    cuts, rejects = prepared(tmp_path / "audio", window_seconds=0.25)
    files = [Path(cut["recording"]["sources"][0]["source"]).name for cut in cuts.values()]
    assert Counter(files) == {"a.wav": 2, "b.mp3": 3}
    assert Counter(reject["reason"] for reject in rejects) == {"duplicate_id": 3, "empty": 1}
    assert {reject["cut_id"].partition("@")[0] for reject in rejects} == {"a", "b"}


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


def test_only_the_file_with_a_name_that_is_not_unicode_is_rejected(tmp_path: Path) -> None:
    some_audio(tmp_path / "audio" / "a.wav")
    some_audio(tmp_path / "audio" / "b.wav").rename(tmp_path / "audio" / "b\udcff.wav")
    some_audio(tmp_path / "audio" / "ü 你.wav")
    cuts, (reject,) = prepared(tmp_path / "audio")
    assert (sorted(cuts), reject["reason"]) == (["a", "ü 你"], "unreadable")
    assert "not Unicode" in reject["detail"]


def test_a_folder_without_audio_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "notes.txt").touch()
    with pytest.raises(ManifestError, match=r"no audio in this folder .* of other kinds: 1 \.txt"):
        entries_of(tmp_path)


def write_all_kinds(folder: Path) -> None:
    """Writes a folder with audio of many suffixes, a tar, Parquet files with and without audio, and other files."""
    for suffix in ("wav", "au", "caf", "aifc", "oga", "w64", "voc", "mp2"):
        form = {"aifc": "AIFF", "oga": "OGG", "mp2": "MP3"}.get(suffix, suffix.upper())
        folder.mkdir(exist_ok=True)
        with (folder / f"{suffix}-1.{suffix}").open("wb") as file:
            soundfile.write(file, hiss(8000, len(suffix)), 16000, format=form)
    content = some_audio(folder.parent / "t.wav").read_bytes()
    write_tar(folder / "deep" / "h.tar", [("x.wav", content), ("x.txt", b"hello")])
    write_parquet(folder / "rows.parquet", [{"bytes": content, "path": "t.wav"}])
    parquet.write_table(pyarrow.table({"text": ["a"]}), folder / "metadata.parquet")
    hidden = ("._wav-1.wav", "__MACOSX/x.wav", ".DS_Store", ".y.wav", ".trash/deep/z.flac", ".h.tar")
    for name in ("a.txt", "B.TXT", "README", "c.x y", "d.zip", *hidden):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(b"\0\x05\x16\7")


def test_a_folder_is_read_with_its_tars_and_parquet_files_and_the_rest_is_counted(tmp_path: Path) -> None:
    write_all_kinds(tmp_path / "m")
    report = prepare_corpus(tmp_path / "m", tmp_path / "m.corpus")
    corpus = Corpus.open(tmp_path / "m.corpus")
    lines = {corpus.line(row)["id"]: corpus.line(row) for row in range(len(corpus))}
    names = ("wav", "au", "caf", "aifc", "oga", "w64", "voc", "mp2")
    assert sorted(lines) == sorted([*(f"{name}-1" for name in names), "deep/x", "rows/0"])
    assert lines["deep/x"]["supervisions"][0]["text"] == "hello"
    assert report.rejected == {}
    counts = {".txt": 2, ".parquet": 1, ".zip": 1, "other": 1, "without suffix": 1}
    assert report.other_files == counts
    text = "not read: 6 files of other kinds (2 .txt, 1 .parquet, 1 .zip, 1 other, 1 without suffix)"
    assert text in report.notes
    assert text in (tmp_path / "m.corpus" / "report.html").read_text()


def test_common_formats_come_before_others_of_the_same_name(tmp_path: Path) -> None:
    for name in ("a.aac", "a.mp3", "a.wav", "b.mp4", "c.caf", "c.flac"):
        (tmp_path / name).touch()
    files = [Path(entry.where).name for entry in entries_of(tmp_path)]
    assert files == ["a.wav", "c.flac", "a.mp3", "a.aac", "b.mp4", "c.caf"]
    objects = [ObjectInfo(f"s3://b/{name}", 1, None) for name in sorted(files)]
    assert [info.location.rpartition("/")[2] for info in sorted_as_files(objects)] == files
