import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nestdata import ManifestError
from nestdata.manifest import Entry, count_entries, detect_format, read_manifest
from tests.synthesis import hiss, write_audio, write_jsonl


def lhotse_cut(cut_id: str = "c1") -> dict[str, Any]:
    recording = {
        "id": "r1",
        "sources": [{"type": "file", "channels": [0], "source": "a.wav"}],
        "sampling_rate": 16000,
        "num_samples": 16000,
        "duration": 1.0,
    }
    return {"id": cut_id, "start": 0.0, "duration": 1.0, "channel": 0, "recording": recording, "type": "MonoCut"}


def entries_of(path: Path) -> list[Entry]:
    return list(read_manifest(path))


def test_a_nemo_line_becomes_an_entry(tmp_path: Path) -> None:
    row = {"audio_filepath": "wavs/a.wav", "offset": 1.5, "duration": 2, "text": "hello", "speaker": "s1"}
    manifest = write_jsonl(tmp_path / "m.json", [row])
    assert entries_of(manifest) == [
        Entry(
            where=f"{manifest}:1",
            cut_id="wavs/a@1.500+2.000",
            path=tmp_path / "wavs" / "a.wav",
            offset=1.5,
            duration=2.0,
            labels={"text": "hello", "speaker": "s1"},
        )
    ]


def test_audio_filename_is_read_as_audio_filepath(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.json", [{"audio_filename": "/data/a.flac"}])
    (entry,) = entries_of(manifest)
    assert (entry.path, entry.cut_id, entry.duration) == (Path("/data/a.flac"), "/data/a", None)


@pytest.mark.parametrize(
    ("span", "cut_id"),
    [
        ({}, "a"),
        ({"duration": 2.0}, "a"),
        ({"offset": 0}, "a@0.000"),
        ({"offset": 0.5}, "a@0.500"),
        ({"offset": 0.5, "duration": 0.25}, "a@0.500+0.250"),
        ({"offset": None, "duration": None}, "a"),
    ],
)
def test_the_id_of_a_nemo_line_tells_its_span(tmp_path: Path, span: dict[str, Any], cut_id: str) -> None:
    (entry,) = entries_of(write_jsonl(tmp_path / "m.json", [{"audio_filepath": "a.wav", **span}]))
    assert entry.cut_id == cut_id


def test_empty_lines_are_skipped_but_counted_in_places(tmp_path: Path) -> None:
    manifest = tmp_path / "m.json"
    manifest.write_text('\n{"audio_filepath": "a.wav"}\n\n\n{"audio_filepath": "b.wav"}')
    assert [entry.where for entry in entries_of(manifest)] == [f"{manifest}:2", f"{manifest}:5"]


def test_lhotse_cuts_are_read_plain_and_compressed(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "cuts.jsonl", [lhotse_cut("c1"), lhotse_cut("c2")])
    packed = tmp_path / "cuts.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for manifest in (plain, packed):
        entries = entries_of(manifest)
        assert [entry.cut_id for entry in entries] == ["c1", "c2"]
        assert [entry.where for entry in entries] == [f"{manifest}:1", f"{manifest}:2"]
        assert all(entry.cut is not None and entry.cut.num_samples == 16000 for entry in entries)


def test_a_folder_gives_its_audio_in_order_with_subfolders(tmp_path: Path) -> None:
    for name in ("b.wav", "a.FLAC", "sub/c.ogg"):
        write_audio(tmp_path / name, hiss(1600, 1))
    (tmp_path / "notes.txt").write_text("no audio")
    (tmp_path / "d.wav").mkdir()
    assert [entry.cut_id for entry in entries_of(tmp_path)] == ["a", "b", "sub/c"]


def test_formats_are_told_apart_by_content(tmp_path: Path) -> None:
    assert detect_format(tmp_path) == "folder"
    assert detect_format(write_jsonl(tmp_path / "a.jsonl", [{"audio_filepath": "a.wav"}])) == "nemo"
    assert detect_format(write_jsonl(tmp_path / "b.json", [lhotse_cut()])) == "lhotse"


def test_entries_are_counted(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.json", [{"audio_filepath": f"{i}.wav"} for i in range(12)])
    (tmp_path / "m.json.gz").write_bytes(gzip.compress(manifest.read_bytes()))
    write_audio(tmp_path / "audio" / "a.wav", hiss(1600, 1))
    assert [count_entries(tmp_path / name) for name in ("m.json", "m.json.gz", "audio")] == [12, 12, 1]


def test_a_manifest_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"m\.json: no such manifest"):
        entries_of(tmp_path / "m.json")
    with pytest.raises(ManifestError, match=r"m\.json: no such manifest"):
        count_entries(tmp_path / "m.json")


def test_an_empty_manifest_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("\n\n")
    with pytest.raises(ManifestError, match=r"m\.json: the manifest is empty"):
        entries_of(tmp_path / "m.json")


def test_a_folder_without_audio_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"no audio in this folder .* \.flac"):
        entries_of(tmp_path)


def test_a_line_of_no_known_kind_is_an_error_that_lists_its_keys(tmp_path: Path) -> None:
    manifest = write_jsonl(tmp_path / "m.json", [{"path": "a.wav", "seconds": 1}])
    with pytest.raises(ManifestError, match=r"m\.json:1: neither a NeMo line .* its keys are: path, seconds"):
        entries_of(manifest)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"audio_filepath": "a.wav", "dura', "not JSON"),
        ("RIFF\xff\x00", "not JSON"),
        ('["a.wav", 1.0]', "list where a JSON object was expected"),
        ('"a.wav"', "str where a JSON object was expected"),
        ('{"text": "no audio"}', "the key audio_filepath is missing"),
        ('{"audio_filepath": ["a.wav"]}', r"audio_filepath is \['a.wav'\]"),
        ('{"audio_filepath": ""}', "audio_filepath is ''"),
        ('{"audio_filepath": null}', "the key audio_filepath is missing"),
        ('{"audio_filepath": "/"}', "audio_filepath is '/'"),
        ('{"audio_filepath": "a.wav", "duration": -1}', "duration is -1"),
        ('{"audio_filepath": "a.wav", "offset": -0.5}', r"offset is -0\.5"),
        ('{"audio_filepath": "a.wav", "duration": "1.0"}', r"duration is '1\.0'"),
        ('{"audio_filepath": "a.wav", "duration": NaN}', "duration is nan"),
        ('{"audio_filepath": "a.wav", "duration": Infinity}', "duration is inf"),
        ('{"audio_filepath": "a.wav", "duration": true}', "duration is True"),
    ],
)
def test_a_bad_line_of_a_nemo_manifest_is_an_error_that_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    good = [json.dumps({"audio_filepath": f"{i}.wav"}) for i in range(8)]
    manifest = tmp_path / "m.json"
    manifest.write_bytes("\n".join([*good[:6], line, *good[6:]]).encode("latin-1"))
    with pytest.raises(ManifestError, match=rf"m\.json:7: {message}"):
        entries_of(manifest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "MixedCut"}, "a MixedCut where a MonoCut was expected"),
        ({"recording": None}, "the cut has no recording"),
        ({"start": None}, "the cut has no start"),
        ({"start": -1.0}, r"start is -1\.0"),
        ({"duration": "1"}, "duration is '1'"),
        ({"unknown_field": 1}, r"not a Lhotse cut \(TypeError"),
    ],
)
def test_a_bad_line_of_lhotse_cuts_is_an_error_that_names_the_line(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    rows = [lhotse_cut("c1"), {**lhotse_cut("c2"), **changes}]
    manifest = write_jsonl(tmp_path / "cuts.jsonl", rows)
    with pytest.raises(ManifestError, match=rf"cuts\.jsonl:2: {message}"):
        entries_of(manifest)


@pytest.mark.parametrize("damage", ["truncated", "not compressed", "flipped"])
def test_a_compressed_manifest_that_is_damaged_is_an_error(tmp_path: Path, damage: str) -> None:
    rows = write_jsonl(tmp_path / "cuts.jsonl", [lhotse_cut(f"c{i}") for i in range(200)]).read_bytes()
    packed = bytearray(gzip.compress(rows))
    if damage == "flipped":
        packed[len(packed) // 2 :] = bytes(byte ^ 0xFF for byte in packed[len(packed) // 2 :])
    content = {"truncated": packed[:-200], "not compressed": rows, "flipped": packed}[damage]
    (tmp_path / "cuts.jsonl.gz").write_bytes(content)
    for read in (entries_of, count_entries):
        with pytest.raises(ManifestError, match=r"cuts\.jsonl\.gz(:\d+)?: (cannot be read|not JSON)"):
            read(tmp_path / "cuts.jsonl.gz")
