import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from nestdata import ConfigError, ManifestError, PrepareConfig, prepare_corpus
from nestdata.prepare.inputs.rows import AUDIO_NAMES
from tests.nestdata.prepare.inputs.reading import prepared
from tests.nestdata.prepare.inputs.shards import write_tar
from tests.synthesis import hiss, write_audio

RATE = 16000
SPANS = [
    ("start", "end"), ("offset", "duration"), ("start_time", "end_time"), ("begin_time", "end_time"),
    ("onset", "offset"), ("start", "stop"), ("begin", "dur"), ("segment_start", "segment_end"), ("onset", "duration"),
]  # fmt: skip
UNITS = {
    "": 1, "_s": 1, "_seconds": 1, "_ms": 1000, "_samples": RATE, " (s)": 1, "[ms]": 1000, "/s": 1, " (samples)": RATE,
}  # fmt: skip


OTHER_NAMES = [
    "a",
    "Clip Name",
    "t0",
    "t1",
    "xmin",
    "x-max",
    "von",
    "bis",
    "Beginn",
    "Wörter",
    "side",
    "start_frame",
    "n",
]


def written(folder: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"m.{form}"
    if form in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if form == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif form == "tar":
        audio = (folder / "call.wav").read_bytes()
        members = [(f"{i}.{kind}", json.dumps(row).encode() if kind == "json" else audio)
                   for i, row in enumerate(rows) for kind in ("wav", "json")]  # fmt: skip
        write_tar(path, members)
    else:
        path.write_text(json.dumps(rows) if form == "json" else "".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def check_a_table(folder: Path, seed: int) -> None:
    """Prepares a random table or manifest, and compares its cuts with what its rows say."""
    chosen = random.Random(seed)
    form, is_named = chosen.choice(["csv", "tsv", "jsonl", "json", "parquet", "tar"]), chosen.random() < 0.5
    span, unit = chosen.choice(SPANS), chosen.choice([*UNITS])
    names = [chosen.choice(AUDIO_NAMES), *(f"{name}{unit}" for name in span), chosen.choice(["channel", "channel_id"])]
    names.append(chosen.choice(["text", "sentence", "raw_text"]))
    changed = chosen.choice([str.lower, str.upper, str.title])
    names = [changed(name) for name in names]
    if is_named:
        names = chosen.sample(OTHER_NAMES, 5)
    write_audio(folder / "call.wav", np.stack([hiss(8 * RATE, 1), hiss(8 * RATE, 2)], axis=1))
    rows, expected, order = list[dict[str, Any]](), list[tuple[float, float, int, str]](), chosen.sample(range(5), 5)
    for number in range(5):
        start, length, channel = 1.25 * number, chosen.choice([0.5, 1.0]), number % 2
        second = length if span[1].startswith("du") else start + length
        times = [round(value * UNITS[unit], 3) for value in (start, second)]
        items = [*zip(names, ["call.wav", *times, channel, f"words {number}"], strict=True)]
        rows.append(dict(items[index] for index in order))
        expected.append((start, length, channel, f"words {number}"))
    roles = ("audio", "start", "duration" if span[1].startswith("du") else "end", "channel", "text")
    suffix = {1000: ":ms", RATE: ":samples"}.get(UNITS[unit], "")
    given = [f"{role}={name}{suffix if role in ('start', 'end', 'duration') else ''}"
             for role, name in zip(roles, names, strict=True) if role != "audio" or form != "tar"]  # fmt: skip
    cuts, rejects = prepared(written(folder, form, rows), columns=",".join(given) if is_named else "")
    assert rejects == []
    found = [(cut["start"], cut["duration"], cut["channel"], cut["supervisions"][0]["text"]) for cut in cuts.values()]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("seed", range(48))
def test_a_row_is_a_cut_of_its_span_and_channel_whatever_its_columns_are_called(tmp_path: Path, seed: int) -> None:
    check_a_table(tmp_path, seed)


@pytest.mark.slow
def test_many_more_tables_are_read_as_they_say(tmp_path: Path) -> None:
    for seed in np.random.default_rng().integers(1 << 32, size=300).tolist():
        folder = tmp_path / str(seed)
        folder.mkdir()
        check_a_table(folder, seed)  # the name of the folder is the seed


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"path": "a.wav", "start": 0, "begin": 1}, r"m\.jsonl:1: start and begin differ\. Fix or drop this line"),
        ({"path": "a.wav", "start_ms": 0, "duration_samples": 9}, "do not give a start and an end in one unit"),
        ({"path": "a.wav", "end": 9}, r"m\.jsonl:1: end do not give a start"),
        ({"path": "a.wav", "start": 1, "end": 3, "duration": 1}, "from start to end are 2, but the duration is 1"),
        ({"path": "a.wav", "start_samples": 0, "end_samples": 9, "duration_samples": 5}, "but the duration is 5"),
        ({"path": "a.wav", "start": 3, "end": 2}, r"the end, 2, is not after the start\. Fix or drop this line"),
        ({"path": "a.wav", "start_samples": 0, "duration_samples": 1.5}, r"duration_samples is 1\.5\. Give samples"),
        ({"path": "a.wav", "start": 10**400}, r"start is 1000+\. Give seconds as a number"),
        ({"path": "a.wav", "start": True}, r"start is True\. Give seconds as a number"),
        ({"path": "a.wav", "channel": 10**400}, "Give the channel as a number"),
        ({"path": "a.wav", "start_time": "2021-03-04"}, r"start_time is '2021-03-04'\. Give seconds as a number"),
        ({"path": "a.wav", "channel": "UCx7"}, r"channel is 'UCx7'\. Give the channel as a number, counted from 0"),
        ({"path": "a.wav", "channel": -1}, "Give the channel as a number"),
        ({"audio": {"bytes": "UklGRg==", "path": "a.wav"}}, r"audio is \{'bytes': .*\. Give the path of one file"),
        ({"path": ["a.wav", "b.wav"]}, r"path is \['a\.wav', 'b\.wav'\]\. Give the path of one file"),
    ],
)
def test_a_row_without_one_meaning_is_an_error_that_names_its_column(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        prepared(written(tmp_path, "jsonl", [row]), format="nemo")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"path": "a.wav", "start": 1, "begin": 1.0, "duration": 2, "duration_ms": 2000}, (1.0, 2.0, "a@1.000+2.000")),
        ({"path": "a.wav", "offset": None, "duration": 2}, (0.0, 2.0, "a")),
        ({"path": "a.wav", "end": 3, "duration": 2}, (1.0, 2.0, "a@1.000+2.000")),
        ({"path": "a.wav", "channel": float("nan")}, (0.0, 4.0, "a")),
        ({"path": "a.wav", "channel": "NaN", "start": "nan", "duration": " NaN "}, (0.0, 4.0, "a")),
        ({"path": "a.wav", "path_of_original": "b.wav"}, (0.0, 4.0, "a")),
        ({"path": "a.wav", "-" * 100_000 + "!": 1}, (0.0, 4.0, "a")),  # not a second for each character
        ({"path": "a.wav", "offset": 0}, (0.0, 4.0, "a@0.000")),
        ({"Audio_Filepath": "a.wav", "Start": 1}, (1.0, 3.0, "a@1.000")),
        ({"audio_filepath": None, "audio_filename": "a.wav"}, (0.0, 4.0, "a")),
        ({"path": "a.wav", "start_samples": 16000, "start": 2, "duration": 1}, (2.0, 1.0, "a@2.000+1.000")),
        ({"audio": {"bytes": None, "path": "a.wav"}, "start": 1}, (1.0, 3.0, "a@1.000")),
        ({"path": "a.wav", "txt": "second", "sentence": "first"}, (0.0, 4.0, "a")),
    ],
)
def test_a_row_that_says_the_same_twice_or_leaves_values_out_is_read(
    tmp_path: Path, row: dict[str, Any], expected: tuple[float, float, str]
) -> None:
    write_audio(tmp_path / "a.wav", hiss(4 * RATE, 1))
    cuts, rejects = prepared(written(tmp_path, "jsonl", [row]))
    assert rejects == []
    (cut,) = cuts.values()
    assert (cut["start"], cut["duration"], cut["id"]) == expected
    assert [span["text"] for span in cut["supervisions"]] == (["first"] if "sentence" in row else [])


def test_slices_of_a_file_take_the_channel_of_their_row(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", np.stack([hiss(4 * RATE, 1), hiss(4 * RATE, 2)], axis=1))
    rows = [{"path": "a.wav:16000:8000", "channel": channel, "duration_ms": 500} for channel in (0, 1)]
    cuts, rejects = prepared(written(tmp_path, "csv", rows))
    assert rejects == []
    assert {(cut["start"], cut["duration"], cut["channel"]) for cut in cuts.values()} == {(1.0, 0.5, 0), (1.0, 0.5, 1)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"path": "a.wav", "clip_begin": 1},
            r"clip_begin is 1, which looks like a time, .* --columns start=clip_begin",
        ),
        ({"path": "a.wav", "tEnd": "2.5"}, r"tEnd is 2\.5, which looks like a time, .* --columns end=tEnd"),
        ({"path": "a.wav", "start": 5, "t_end": 1}, r"t_end is 1, which looks like a time, .* --columns end=t_end"),
        ({"path": "a.wav", "from": 1, "to": 2}, r"--columns start=from,end=to, or"),
        ({"path": "a.wav", "my onset": 1, "my offset": 2}, r"--columns 'start=my onset,end=my offset', or"),
        ({"path": "a.wav", "clip_start": "0:01.5"}, r"clip_start is '0:01\.5', which looks like a time"),
        ({"path": "a.wav", "clip_start": "1,5"}, r"clip_start is '1,5', which looks like a time"),
        ({"path": "a.wav", "start": 1, "length": 1}, r"length is 1, which looks like a time, .*--columns duration=len"),
        ({"path": "a.wav", "offset": 1, "num_frames": 1}, r"num_frames is 1, which looks like a time"),
        ({"path": "a.wav", "ch": 1}, r"ch is 1, which looks like a channel"),
        ({"path": "a.wav", "clip.begin": 1}, r"clip\.begin is 1, which looks like a time"),
        ({"path": "a.wav", "rec-channel": 1}, r"which looks like a channel, .* --columns channel=rec-channel"),
        ({"path": "a.wav", "chan": "left"}, r"chan is 'left', which looks like a channel"),
        ({"wav": "a.wav", "noisy_path": "b/c.flac"}, r"looks like an audio file, .* --columns audio=wav\."),
    ],
)
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_what_looks_like_a_time_a_channel_or_audio_and_is_not_read_is_an_error(
    tmp_path: Path, form: str, row: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, form, [row])
    with pytest.raises(ManifestError, match=message.replace("1, which", r"1(?:\.0)?, which").replace("is 2", "is '?2")):
        prepared(path)


@pytest.mark.parametrize("given", ["start", "end", "duration", "channel"])
def test_a_span_that_is_named_in_part_is_an_error_that_names_the_rest(tmp_path: Path, given: str) -> None:
    row = {"path": "a.wav", "from": 1, "to": 2, "ch": 0}
    roles = {"start": "from", "end": "to", "duration": "", "channel": "ch"}
    with pytest.raises(ManifestError, match=r"--columns .*(start=|end=)"):
        prepared(written(tmp_path, "csv", [row]), columns=f"{given}={roles[given]}")


def test_numbers_that_are_no_times_of_the_file_are_labels(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", hiss(4 * RATE, 1))
    row = {
        "audio_filepath": "a.wav",
        "num_channels": 2,
        "channel_count": 1,
        "end_reason": "timeout",
        "wav": "old/a.flac",
    }
    cuts, _ = prepared(written(tmp_path, "jsonl", [row]))
    assert cuts["a"]["custom"] == {key: value for key, value in row.items() if key != "audio_filepath"}
    row = {"path": "a.wav", "start": 2, "clip_end": 7, "channel": 3}
    cuts, _ = prepared(written(tmp_path, "csv", [row]), columns="start=,end=,channel=")
    assert (cuts["a"]["duration"], cuts["a"]["custom"]) == (4.0, {"start": "2", "clip_end": "7", "channel": "3"})


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_file_as_long_as_its_span_in_a_recording_is_a_clip_and_used_whole(tmp_path: Path, form: str) -> None:
    write_audio(tmp_path / "a.wav", hiss(4 * RATE, 1))
    write_audio(tmp_path / "b.wav", hiss(4 * RATE, 2))
    rows = [
        {"path": "a.wav", "begin_time": 100.5, "end_time": 104.5},
        {"path": "b.wav", "begin_time": 9, "end_time": 12},
    ]
    cuts, rejects = prepared(written(tmp_path, form, rows))
    ((cut_id, cut),) = cuts.items()
    assert (cut_id, cut["start"], cut["duration"]) == ("a@100.500+4.000", 0.0, 4.0)
    assert [reject["reason"] for reject in rejects] == ["wrong_duration"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("foo=a", r"'foo=a' is not ROLE=NAME with one of the roles audio, start, end"),
        ("audio", "'audio' is not ROLE=NAME"),
        ("text=", "'text=' is not ROLE=NAME"),
        ("start=a,start=b", "names start twice"),
        ("start=a:ms,end=b:samples", "one span has seconds and samples"),
        ("start=a_samples,duration=b", "one span has seconds and samples"),
    ],
)
def test_a_wrong_text_for_columns_is_an_error(columns: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrepareConfig(columns=columns)


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "wav"])
def test_a_column_that_is_named_and_not_there_is_an_error(tmp_path: Path, form: str) -> None:
    write_audio(tmp_path / "m.wav", hiss(RATE, 1))
    path = tmp_path / "m.wav" if form == "wav" else written(tmp_path, form, [{"path": "m.wav", "begin": 0}])
    with pytest.raises((ManifestError, ConfigError), match=r"--columns.*start|beginning.*--columns"):
        prepared(path, columns="start=beginning")


def test_a_corpus_says_how_its_inputs_were_read(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", hiss(4 * RATE, 1))
    rows = [
        {"Clip": "a.wav", "von": 0, "bis": 500, "Mood": "calm"},
        {"Clip": "a.wav", "von": 500, "bis": 900, "age": 3},
    ]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PrepareConfig(columns="audio=Clip,start=von:ms,end=bis:ms")
    report = prepare_corpus([tmp_path / "m.jsonl", tmp_path / "a.wav"], tmp_path / "c.corpus", config)
    line = "m.jsonl read as nemo: audio from Clip, start from von in ms, end from bis in ms, labels: Mood, age"
    assert report.notes[0] == f"{tmp_path}/{line}"
    assert report.notes[1] == f"{tmp_path}/a.wav read as audio"
    meta = json.loads((tmp_path / "c.corpus" / "meta.json").read_text())
    names = {"audio": ["Clip"], "start": ["von in ms"], "end": ["bis in ms"], "labels": ["Mood", "age"]}
    assert meta["read_as"] == [
        {"input": f"{tmp_path}/m.jsonl", "format": "nemo", "names": names},
        {"input": f"{tmp_path}/a.wav", "format": "audio", "names": {}},
    ]
    assert line in (tmp_path / "c.corpus" / "report.html").read_text()
