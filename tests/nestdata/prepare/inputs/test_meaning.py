"""Missing values and numbers in labels, from every kind of input to the cuts of a corpus."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nestdata.prepare.inputs.rows import divide_labels, label_text
from tests.nestdata.prepare.inputs.reading import entries_of, lhotse_cut, prepared, some_audio

NAN = math.nan


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None), (NAN, None), (math.inf, None), ("", ""), ("nan", "nan"), ("1.0", "1.0"), (1.0, "1"), (-2.0, "-2"),
        (0.5, "0.5"), (7, "7"), (True, "True"), (1e300, "1e+300"), (2.0**53, "9007199254740992.0"), (["a"], "['a']"),
    ],
)  # fmt: skip
def test_a_label_is_text_or_missing(value: object, text: str | None) -> None:
    assert label_text(value) == text


def test_fields_of_tables_are_missing_if_they_are_not_a_number(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text(
        "path,text,sentence,speaker,lang,age,accent,a\na.wav,nan,1.0,12.0,nan,NaN,,b\nb.wav,,,nan,NaN,,,\n"
    )
    first, second = entries_of(tmp_path / "m.csv")
    assert first.labels == {"sentence": "1.0", "speaker": "12", "lang": "nan", "a": "b"}
    assert second.labels == {}


@pytest.mark.parametrize(
    ("given", "fields", "custom"),
    [
        ({"transcript": "a", "client_id": 7.0, "age": None}, {"text": "a", "speaker": "7"}, {"age": None}),
        ({"text": "a", "sentence": "b", "transcript": "c"}, {"text": "a"}, {"sentence": "b", "transcript": "c"}),
        ({"sentence": "b", "transcription": "c", "text": None}, {"text": "c"}, {"sentence": "b"}),
        ({"lang": NAN, "speaker": None}, {}, {}),
    ],
)
def test_of_several_labels_for_a_field_one_is_taken_and_the_others_are_kept(
    given: dict[str, Any], fields: dict[str, str], custom: dict[str, Any]
) -> None:
    assert divide_labels(given) == (fields, custom)


def labels_of(path: Path, **config: Any) -> dict[str, dict[str, Any]]:
    """Returns text, language and speaker of each cut."""
    cuts, rejects = prepared(path, **config)
    assert rejects == []
    found = {cut_id: cut["supervisions"][0] if cut["supervisions"] else {} for cut_id, cut in cuts.items()}
    return {key: {k: v for k, v in row.items() if k in ("text", "language", "speaker")} for key, row in found.items()}


ROWS = [{"text": NAN, "lang": NAN, "speaker": 1.0}, {"text": "b", "lang": None, "speaker": NAN}]
LABELS = [{"speaker": "1"}, {"text": "b"}]


def test_json_lines(tmp_path: Path) -> None:
    for name in "ab":
        some_audio(tmp_path / f"{name}.wav")
    lines = [{"audio_filepath": f"{name}.wav"} | row for name, row in zip("ab", ROWS, strict=True)]
    (tmp_path / "m.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(labels_of(tmp_path / "m.json").values()) == LABELS


def test_lhotse_supervisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_audio(tmp_path / "a.wav")
    monkeypatch.chdir(tmp_path)
    span = {"id": "s", "recording_id": "r1", "start": 0.0, "duration": 0.5, "channel": 0}
    rows = [row | {"language": row["lang"]} for row in ROWS]
    cuts = [
        lhotse_cut(f"c{i}") | {"supervisions": [span | {k: v for k, v in row.items() if k != "lang"}]}
        for i, row in enumerate(rows)
    ]
    (tmp_path / "cuts.jsonl").write_text("".join(json.dumps(cut) + "\n" for cut in cuts))
    assert list(labels_of(tmp_path / "cuts.jsonl").values()) == LABELS
    assert list(labels_of(tmp_path / "cuts.jsonl.corpus").values()) == LABELS
