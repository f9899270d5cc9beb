import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestdata import ManifestError
from nestdata.prepare.inputs.rows import AUDIO_NAMES
from tests.nestdata.prepare.inputs.reading import prepared
from tests.synthesis import hiss, write_audio

RATE = 16000
SPANS = [
    ("start", "end"), ("offset", "duration"), ("start_time", "end_time"), ("begin_time", "end_time"),
    ("onset", "offset"), ("start", "stop"), ("begin", "dur"), ("segment_start", "segment_end"), ("onset", "duration"),
]  # fmt: skip
UNITS = {"": 1, "_s": 1, "_seconds": 1, "_ms": 1000, "_samples": RATE}


def written(folder: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"m.{form}"
    if form in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if form == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows) if form == "json" else "".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("seed", range(24))
def test_a_row_is_a_cut_of_its_span_and_channel_whatever_its_columns_are_called(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    form, span, unit = chosen.choice(["csv", "tsv", "jsonl", "json"]), chosen.choice(SPANS), chosen.choice([*UNITS])
    names = [chosen.choice(AUDIO_NAMES), *(f"{name}{unit}" for name in span)]
    channel_name, text_name = chosen.choice(["channel", "channel_id"]), chosen.choice(["text", "sentence", "raw_text"])
    names = [chosen.choice([str.lower, str.upper])(name) if form in ("csv", "tsv") else name for name in names]
    write_audio(tmp_path / "call.wav", np.stack([hiss(8 * RATE, 1), hiss(8 * RATE, 2)], axis=1))
    rows, expected = list[dict[str, Any]](), list[tuple[float, float, int, str]]()
    for number in range(5):
        start, length, channel = 1.25 * number, chosen.choice([0.5, 1.0]), number % 2
        second = length if span[1].startswith("du") else start + length
        values = [round(value * UNITS[unit], 3) for value in (start, second)]
        row = dict(zip(names, ["call.wav", *values], strict=True)) | {
            channel_name: channel,
            text_name: f"words {number}",
        }
        items = [*row.items()]
        if number == 0:
            order = chosen.sample(range(len(items)), len(items))
        rows.append(dict(items[index] for index in order))
        expected.append((start, length, channel, f"words {number}"))
    cuts, rejects = prepared(written(tmp_path, form, rows))
    assert rejects == []
    found = [(cut["start"], cut["duration"], cut["channel"], cut["supervisions"][0]["text"]) for cut in cuts.values()]
    assert sorted(found) == sorted(expected)


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
        ({"Audio_Filepath": "a.wav", "Start": 1}, (1.0, 3.0, "a@1.000")),
        ({"audio_filepath": None, "audio_filename": "a.wav"}, (0.0, 4.0, "a")),
        ({"path": "a.wav", "start_samples": 16000, "start": 2, "duration": 1}, (2.0, 1.0, "a@2.000+1.000")),
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
