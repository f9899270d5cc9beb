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
        ({"path": "a.wav", "start": 0, "begin": 0}, r"m\.jsonl:1: start, begin do not give one start and one end"),
        ({"path": "a.wav", "start_ms": 0, "duration_samples": 9}, "do not give one start and one end in one unit"),
        ({"path": "a.wav", "start": 1, "end": 3, "duration": 1}, "lasts 2 s from its start to its end, but its"),
        ({"path": "a.wav", "start": 3, "end": 2}, r"ends at 2, before its start\. Fix or drop this line"),
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
