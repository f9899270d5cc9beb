import json
import re
import shutil
from pathlib import Path

from nestdata import PrepareConfig, prepare_corpus
from nestdata.prepare.finish import PrepareReport
from tests.nestdata.prepare.inputs.shards import write_tar
from tests.synthesis import hiss, write_audio


def prepared(folder: Path, jobs: int = 1, **config: float) -> PrepareReport:
    settings = PrepareConfig(probe="decode", **config)  # type: ignore[arg-type]
    return prepare_corpus(folder, folder.with_suffix(".corpus"), settings, overwrite=True, jobs=jobs)


def num_copies(report: PrepareReport) -> int:
    notes = report.path / "notes.jsonl"
    return sum(json.loads(line)["kind"] == "copy" for line in notes.read_text().splitlines()) if notes.exists() else 0


def test_files_with_the_bytes_of_another_are_counted_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    first = write_audio(folder / "a.wav", hiss(16000, 1))
    for name in ("b.wav", "deep/c.wav"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(first, folder / name)
    shutil.copy(write_audio(folder / "d.flac", hiss(9000, 2)), folder / "e.flac")
    other = hiss(16000, 1)
    other[8000] += 0.1  # the same size and the same ends
    write_audio(folder / "f.wav", other)
    report = prepared(folder)
    assert (report.num_cuts, num_copies(report)) == (6, 3)
    expected = f"files byte-equal to another one: 3, such as {folder}/b.wav, a copy of {folder}/a.wav; see notes.jsonl"
    assert expected in report.notes
    listed = [json.loads(line) for line in (report.path / "notes.jsonl").read_text().splitlines()]
    pairs = [("b.wav", "a.wav"), ("deep/c.wav", "b.wav"), ("e.flac", "d.flac")]
    assert listed == [
        {"kind": "copy", "where": f"{folder}/{copy}", "detail": f"{folder}/{copy}, a copy of {folder}/{first}"}
        for copy, first in pairs
    ]
    assert prepared(folder, jobs=2).notes == report.notes


def test_members_of_tars_are_compared(tmp_path: Path) -> None:
    content = [write_audio(tmp_path / f"{seed}.wav", hiss(8000, seed)).read_bytes() for seed in range(2)]
    members = [("a.wav", content[0]), ("b.wav", content[1]), ("c.wav", content[0])]
    write_tar(tmp_path / "m" / "t.tar", members)
    report = prepared(tmp_path / "m")
    assert (report.num_cuts, num_copies(report)) == (3, 1)
    assert re.search(
        r"another one: 1, such as \S+/t\.tar \(byte \d+\), a copy of \S+/t\.tar \(byte \d+\)", "".join(report.notes)
    )
