"""Notes on entries that are used, but not as a person may expect."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from nestdata import PrepareConfig, load_audio, prepare_corpus
from nestdata.prepare.finish import PrepareReport
from tests.nestdata.prepare.inputs.shards import write_tar
from tests.synthesis import encoded, hiss, read_jsonl, write_audio, write_jsonl


def noted(report: PrepareReport) -> list[tuple[str, str]]:
    """Returns the kind and position of each note."""
    path = report.path / "notes.jsonl"
    return [(note["kind"], note["where"]) for note in read_jsonl(path)] if path.exists() else []


def test_entries_of_which_only_the_first_channel_is_used_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    for name, num_channels in (("a", 1), ("b", 2), ("c", 8)):
        write_audio(folder / f"{name}.wav", np.stack([hiss(8000, i) for i in range(num_channels)], axis=1))
    report = prepare_corpus(folder, tmp_path / "0.corpus")
    assert noted(report) == [("first_channel", f"{folder}/{name}.wav") for name in "bc"]
    assert any(f": 2, such as {folder}/b.wav, which has 2; see notes.jsonl" in note for note in report.notes)
    assert noted(prepare_corpus(folder, tmp_path / "mix.corpus", PrepareConfig(channel="mix"))) == []
    assert noted(prepare_corpus(folder, tmp_path / "1.corpus", PrepareConfig(channel=1))) == []
    assert len(load_audio(folder / "b.wav")) == 8000


def test_entries_that_end_with_a_shorter_duration_are_listed_if_they_have_text(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", hiss(16000, 1))
    rows = [
        {"duration": 0.5, "text": "half"},
        {"duration": 0.96, "text": "rounded"},
        {"duration": 0.5},
        {"offset": 0.0, "duration": 0.5, "text": "a span"},
    ]
    for number, row in enumerate(rows):
        write_jsonl(tmp_path / f"{number}.json", [{"audio_filepath": "a.wav", **row}])
    found = [
        noted(prepare_corpus(tmp_path / f"{number}.json", tmp_path / f"{number}.corpus")) for number in range(len(rows))
    ]
    assert found == [[("shortened", f"{tmp_path}/0.json:1")], [], [], []]


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_ogg_that_is_cut_off_is_listed_if_it_is_decoded(tmp_path: Path, subtype: str) -> None:
    folder = tmp_path / "m"
    whole = write_audio(folder / "a.ogg", hiss(64000, 1), subtype=subtype).read_bytes()
    (folder / "b.ogg").write_bytes(whole[: len(whole) // 2])
    write_audio(folder / "c.wav", hiss(8000, 1))
    report = prepare_corpus(folder, tmp_path / "a.corpus", PrepareConfig(probe="decode"))
    assert noted(report) == [("no_end_mark", f"{folder}/b.ogg")]
    assert noted(prepare_corpus(folder, tmp_path / "b.corpus")) == []
    assert report.num_cuts == 3


def test_files_with_the_bytes_of_another_are_listed_and_kept(tmp_path: Path) -> None:
    folder, config = tmp_path / "m", PrepareConfig(probe="decode")
    first = write_audio(folder / "a.wav", hiss(16000, 1))
    for name in ("b.wav", "deep/c.wav"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(first, folder / name)
    shutil.copy(write_audio(folder / "d.flac", hiss(9000, 2)), folder / "e.flac")
    other = hiss(16000, 1)
    other[8000] += 0.1  # the same size and the same ends
    write_audio(folder / "f.wav", other)
    report = prepare_corpus(folder, tmp_path / "m.corpus", config)
    assert report.num_cuts == 6
    expected = f"files byte-equal to another one: 3, such as {folder}/b.wav, a copy of {folder}/a.wav; see notes.jsonl"
    assert expected in report.notes
    assert [(note["kind"], note["detail"]) for note in read_jsonl(report.path / "notes.jsonl")] == [
        ("copy", f"{folder}/{copy}, a copy of {folder}/{first}")
        for copy, first in (("b.wav", "a.wav"), ("deep/c.wav", "b.wav"), ("e.flac", "d.flac"))
    ]
    assert prepare_corpus(folder, tmp_path / "m.corpus", config, overwrite=True, jobs=2).notes == report.notes


def test_members_of_tars_are_compared(tmp_path: Path) -> None:
    content = [encoded(hiss(8000, seed)) for seed in range(2)]
    tar = write_tar(tmp_path / "t.tar", [("a.wav", content[0]), ("b.wav", content[1]), ("c.wav", content[0])])
    report = prepare_corpus(tar, tmp_path / "t.corpus", PrepareConfig(probe="decode"))
    ((kind, where),) = noted(report)
    assert (report.num_cuts, kind) == (3, "copy")
    assert re.fullmatch(r"\S+/t\.tar \(byte \d+\)", where)
