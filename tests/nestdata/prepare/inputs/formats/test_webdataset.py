import json
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nestdata import ManifestError
from nestdata.prepare.inputs.entry import Entry
from nestdata.prepare.inputs.format import InputOptions, open_sources
from nestdata.prepare.inputs.formats.folder import AudioFolder
from nestdata.prepare.inputs.formats.webdataset import WebDataset
from tests.nestdata.prepare.inputs.reading import (
    content_or_reason,
    entries_of,
    format_of,
    latest,
    some_audio,
    source_of,
)
from tests.nestdata.prepare.inputs.shards import write_tar


def samples(folder: Path, *names: str) -> list[tuple[str, str]]:
    """Returns the id of each sample of a tar with these members, and its audio or the reason why it is rejected."""
    entries = entries_of(write_tar(folder / "a.tar", [(name, name.encode()) for name in names]))
    return found_in([*latest(entries).values()])


def found_in(entries: list[Entry]) -> list[tuple[str, str]]:
    return [(entry.cut_id, content_or_reason(entry)) for entry in entries]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.flac", "a.txt", "b.wav"], [("a", "a.flac"), ("b", "b.wav")]),
        (["x/a.cls", "x/a.FLAC", "x/b.ogg"], [("x/a", "x/a.FLAC"), ("x/b", "x/b.ogg")]),
        (["p1.01.flac", "p1.02.flac"], [("p1", "ambiguous_member")]),
        (["a.flac", "a.wav"], [("a", "ambiguous_member")]),
        (["a.txt", "b.flac"], [("a", "no_such_member"), ("b", "b.flac")]),
        (["__index__", "__meta__/x.flac", "._a.flac", "README", "a.flac"], [("a", "a.flac")]),
        (["../a.flac", "b.flac"], [("../a", "unsafe_member"), ("b", "b.flac")]),
    ],
)
def test_members_with_one_key_are_a_sample(tmp_path: Path, names: list[str], expected: list[tuple[str, str]]) -> None:
    found = [(cut_id.replace(str(tmp_path.parent), ".."), content) for cut_id, content in samples(tmp_path, *names)]
    assert found == expected


def test_labels_are_the_values_of_json_and_the_text_of_txt(tmp_path: Path) -> None:
    labels = {"speaker": "s1", "lang": "en", "snr": 3.5, "duration": 7, "offset": 1, "text": "of the json"}
    members = [
        ("a.json", json.dumps(labels).encode()), ("a.flac", b""), ("a.txt", "Grüße\n".encode()),
        ("b.flac", b""), ("b.json", b"[1]"), ("c.flac", b""), ("c.json", b"{"), ("d.flac", b""), ("d.txt", b"\xff"),
    ]  # fmt: skip
    entries = entries_of(write_tar(tmp_path / "a.tar", members))
    assert [entry.labels for entry in entries] == [
        {"speaker": "s1", "lang": "en", "snr": 3.5, "text": "Grüße"},
        {},
        None,
        {"text": "�"},
    ]
    assert content_or_reason(entries[2]) == "unreadable"
    assert [(entry.cut_id, entry.offset, entry.duration) for entry in entries[:2]] == [("a", 1, 7), ("b", 0, None)]


def test_patterns_and_folders_of_tars_are_the_same_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "tars"
    for number in (9, 10):
        write_tar(folder / f"set-{number}.tar", [(f"{number}.flac", str(number).encode())])
    (folder / "index.json").write_text("{}")
    (folder / "set.index").write_bytes(pickle.dumps(print))
    expected = [("9", "9"), ("10", "10")]
    assert found_in(entries_of(folder / "set-{9..10}.tar")) == expected
    assert found_in(entries_of(folder)) == expected[::-1]  # sorted by name
    source = source_of(folder)
    assert (source.count(), source.where(entries_of(folder)[1].number or 0)) == (2, f"{folder}/set-9.tar:1")


def test_the_format_is_detected_by_what_is_in_a_folder(tmp_path: Path) -> None:
    write_tar(tmp_path / "audio_0.tar", [("a.flac", b"")])
    assert isinstance(source_of(tmp_path), WebDataset)
    (tmp_path / "tarred_audio_manifest.json").touch()
    with pytest.raises(
        ManifestError, match=r"tars beside tarred_audio_manifest\.json, as NeMo writes them\. Give a man"
    ):
        format_of(tmp_path)
    assert format_of(tmp_path, "webdataset") == "webdataset"
    some_audio(tmp_path / "b.wav")
    assert [type(source) for source in open_sources([tmp_path], InputOptions())] == [AudioFolder, WebDataset]


@given(names=st.permutations([f"{key}.{suffix}" for key in "abc" for suffix in ("flac", "json", "txt")]))
@example(names=[f"{key}.{suffix}" for suffix in ("json", "txt", "flac") for key in "abc"])
@example(names=[f"{key}.{suffix}" for suffix in ("flac", "json", "txt") for key in "abc"])
@example(names=[f"{key}.{suffix}" for suffix in ("json", "flac", "txt") for key in "abc"])
@settings(max_examples=50)
def test_members_of_a_sample_are_joined_in_any_order(names: list[str]) -> None:
    content = {"flac": "{}.flac", "json": '{{"speaker": "s{}"}}', "txt": "text of {}"}
    members = [(name, content[name[2:]].format(name[0]).encode()) for name in names]
    with TemporaryDirectory() as folder:
        entries = latest(entries_of(write_tar(Path(folder, "t.tar"), members)))
        found = {entry.cut_id: (entry.labels, content_or_reason(entry)) for entry in entries.values()}
    expected = {key: ({"speaker": f"s{key}", "text": f"text of {key}"}, f"{key}.flac") for key in "abc"}
    assert (found, len(entries)) == (expected, 3)
