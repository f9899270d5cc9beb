import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestdata import Corpus, ManifestError
from tests.nestdata.prepare.inputs.reading import entries_of, lhotse_cut, lhotse_recording, prepared, some_audio
from tests.synthesis import hiss, read_audio, write_audio, write_jsonl


def test_positions_are_line_numbers_as_in_an_editor(tmp_path: Path) -> None:
    manifest = tmp_path / "m.json"
    manifest.write_text('\ufeff\n{"audio_filepath": "a.wav"}\r\n\r\n \n{"audio_filepath": "b.wav"}')
    assert [(entry.where, entry.cut_id) for entry in entries_of(manifest)] == [
        (f"{manifest}:2", "a"),
        (f"{manifest}:5", "b"),
    ]


def test_labels_of_a_nemo_line_are_kept_in_the_cut(tmp_path: Path) -> None:
    some_audio(tmp_path / "a.wav")
    row = {"text": "grüße 你好", "lang": "de", "speaker": 17, "emotion": None, "score": 0.5, "words": [{"w": "grüße"}]}
    cuts, rejects = prepared(write_jsonl(tmp_path / "m.json", [{"audio_filepath": "a.wav", **row}]))
    (supervision,) = cuts["a"]["supervisions"]
    assert {key: supervision[key] for key in ("text", "language", "speaker")} == {
        "text": "grüße 你好",
        "language": "de",
        "speaker": "17",
    }
    assert cuts["a"]["custom"] == {"emotion": None, "score": 0.5, "words": [{"w": "grüße"}]}
    assert rejects == []


def test_only_the_line_with_text_that_is_not_unicode_is_rejected(tmp_path: Path) -> None:
    some_audio(tmp_path / "a.wav")
    (tmp_path / "m.json").write_text('{"audio_filepath": "a.wav"}\n{"audio_filepath": "a.wav", "text": "\\ud800"}\n')
    (tmp_path / "n.json").write_text('{"audio_filepath": "a.wav"}\n{"audio_filepath": "\\ud800/a.wav"}\n')
    assert list(prepared(tmp_path / "n.json")[0]) == ["a"]
    cuts, (reject,) = prepared(tmp_path / "m.json")
    assert list(cuts) == ["a"]
    assert (reject["where"], reject["reason"]) == (f"{tmp_path}/m.json:2", "unreadable")
    assert "not Unicode" in reject["detail"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"audio_filepath": "a.wav", "dura',
            r"not JSON \(.*, at character \d+\)\. Every line must be one JSON object",
        ),
        ('{"audio_filepath": "\xff"}', "not JSON .*UTF-8"),
        ('["a.wav", 1.0]', "a JSON array where a JSON object was expected. Write one object per line"),
        ('{"text": "no audio"}', "no audio_filepath among text"),
        (
            '{"audio_filepath": ["a.wav"]}',
            r"audio_filepath is \['a.wav'\]\. .*`sox -M`",
        ),
        ('{"audio_filepath": ""}', "audio_filepath is ''"),
        ('{"audio_filepath": "a\\u0000.wav"}', r"audio_filepath is 'a\\x00.wav'"),
        ('{"audio_filepath": "a.wav", "duration": -1}', "duration is -1. Give seconds as a number from 0 to"),
        (
            '{"audio_filepath": "a.wav", "shard_id": 3}',
            r"a line of a tarred data set \(shard_id 3\) in a manifest of files.* --tars PATTERN",
        ),
    ],
)
def test_a_bad_line_of_a_nemo_manifest_is_an_error_that_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    good = [json.dumps({"audio_filepath": f"{i}.wav"}) for i in range(8)]
    manifest = tmp_path / "m.json"
    manifest.write_bytes("\n".join([*good[:6], line, *good[6:]]).encode("latin-1"))
    with pytest.raises(ManifestError, match=rf"m\.json:7: {message}"):
        entries_of(manifest)


def test_a_lhotse_recording_becomes_a_cut_of_the_requested_channel(tmp_path: Path) -> None:
    stereo = np.stack([hiss(8000, 1), hiss(8000, 2)], axis=1)
    path = write_audio(tmp_path / "a.wav", stereo)
    recordings = [
        lhotse_recording(str(path), "both", channels=2),
        lhotse_recording(str(some_audio(tmp_path / "b.wav")), "one"),
    ]
    cuts, (reject,) = prepared(write_jsonl(tmp_path / "recordings.jsonl", recordings), channel=1)
    assert (list(cuts), reject["reason"]) == (["both"], "no_such_channel")
    assert (cuts["both"]["start"], cuts["both"]["duration"], cuts["both"]["channel"]) == (0.0, 0.5, 1)
    corpus = Corpus.open(tmp_path / "recordings.jsonl.corpus")
    loaded = dict(corpus.load(row) for row in range(len(corpus)))["both"]
    np.testing.assert_array_equal(loaded, read_audio(path)[:, 1])


def test_all_fields_of_a_lhotse_cut_are_kept(tmp_path: Path) -> None:
    path = str(some_audio(tmp_path / "a.wav"))
    supervision = {
        "id": "s1",
        "recording_id": "r1",
        "start": 0.1,
        "duration": 0.3,
        "channel": 0,
        "text": "grüße",
        "language": "de",
        "speaker": "anna",
        "gender": "f",
        "custom": {"mood": 3},
        "alignment": {"word": [["grüße", 0.1, 0.3, 0.9]]},
    }
    cut = {**lhotse_cut("c1", path), "start": 0.05, "duration": 0.4, "supervisions": [supervision], "custom": {"x": 1}}
    cuts, rejects = prepared(write_jsonl(tmp_path / "cuts.jsonl", [cut]))
    assert (cuts, rejects) == ({"c1": cut}, [])


def changed(changes: dict[str, Any], recording: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    cut = {**lhotse_cut("c2", "/a.wav"), **changes}
    if recording or source:
        cut["recording"] = {**cut["recording"], **recording}
        cut["recording"]["sources"] = [{**cut["recording"]["sources"][0], **source}]
    return cut


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (changed({"type": "MixedCut"}, {}, {}), "a MixedCut where a MonoCut was expected. Reduce it to cuts of one"),
        (changed({"id": None}, {}, {}), "the id is None. Give a string"),
        (changed({"recording": None}, {}, {}), "the cut has no recording"),
        (changed({"recording": "r1"}, {}, {}), r"not a Lhotse cut or recording \(AttributeError"),
        (changed({"start": -1.0}, {}, {}), r"start is -1\.0"),
        (changed({"channel": None}, {}, {}), "channel is None. Fix this line"),
        (changed({"unknown_field": 1}, {}, {}), r"not a Lhotse cut or recording \(TypeError"),
        (changed({}, {"sampling_rate": 0}, {}), "sampling_rate is 0"),
        (changed({}, {"num_samples": 2.5}, {}), r"num_samples is 2\.5"),
        (changed({}, {}, {"channels": 0}), "the channels of a source are 0. Give a list of numbers"),
        (changed({}, {}, {"type": "shar"}), "a source of type 'shar', which is not supported. Give the folder"),
        ({"id": "r", "sources": [], "type": "Recording"}, "the cut has no duration"),
    ],
)
def test_a_bad_line_of_a_lhotse_manifest_is_an_error_that_names_the_line(
    tmp_path: Path, cut: dict[str, Any], message: str
) -> None:
    manifest = write_jsonl(tmp_path / "cuts.jsonl", [lhotse_cut("c1"), cut])
    with pytest.raises(ManifestError, match=rf"cuts\.jsonl:2: {message}"):
        entries_of(manifest)
