"""Manifests whose JSON objects are not one per line: arrays, and objects spread over lines."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestdata import ManifestError
from nestdata.prepare.inputs import lines as lines_module
from nestdata.prepare.inputs.lines import Manifest
from tests.nestdata.prepare.inputs.reading import entries_of
from tests.synthesis import write_jsonl

ROWS = [
    {"audio_filepath": "a.wav", "text": 'ü ]}[{"\n'},
    {"audio_filepath": "b.wav", "offset": 0.5, "words": [{"w": 1}]},
]
FORMS = {
    "indented array": json.dumps(ROWS, indent=2),
    "array on one line": json.dumps(ROWS),
    "array of lines": "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n",
    "indented objects": "\n".join(json.dumps(row, indent=1) for row in ROWS),
    "after blank lines": "\ufeff\n \r\n" + json.dumps(ROWS, indent="\t", ensure_ascii=False).replace("\n", "\r\n"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_all_forms_give_the_entries_of_one_object_per_line(tmp_path: Path, form: str, suffix: str) -> None:
    content = FORMS[form].encode()
    path = tmp_path / f"m.json{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    expected = entries_of(write_jsonl(tmp_path / "lines.json", ROWS))
    entries = entries_of(path)
    assert [entry._replace(where="") for entry in entries] == [entry._replace(where="") for entry in expected]
    assert [entry.where for entry in entries] == [f"{path}, object 1", f"{path}, object 2"]


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@given(
    st.lists(st.dictionaries(st.text(), _values, max_size=4), max_size=5), st.sampled_from([None, 0, 3]), st.booleans()
)
@settings(max_examples=20)
def test_what_json_dump_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], indent: int | None, is_array: bool
) -> None:
    path = tmp_path_factory.mktemp("json") / "m.json"
    text = json.dumps(rows, indent=indent) if is_array else "\n".join(json.dumps(row, indent=indent) for row in rows)
    path.write_text(text)
    assert repr([json.loads(item) for item in Manifest(path).objects()]) == repr(rows)  # NaN does not equal itself


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"audio_filepath": "a.wav"}', "object 2: ends here, before the end of its JSON"),
        ('[{"audio_filepath": "a.wav"}, {"audio', "object 2: not JSON"),
        ('[{"audio_filepath": "a.wav"}, {"text": "x"}]', "object 2: no audio_filepath among text"),
        ('[{"audio_filepath": "a.wav"}, ' + '{"x":' * 100_000, "object 2: not JSON \\(maximum recursion"),
        ('[{"audio_filepath": "a.wav", "shard_id": 1}]', "a manifest of a tarred data set in another form.*`jq -c"),
    ],
)
def test_what_is_not_an_object_is_an_error_that_names_its_number(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(ManifestError, match=rf"m\.json[,:] {message}"):
        entries_of(tmp_path / "m.json")


def test_arrays_and_objects_may_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('[{"a": 1}]\n{"b": 2}\n[{"c": 3},\n{"d": 4}]')
    found = [json.loads(item) for item in Manifest(tmp_path / "m.json").objects()]
    assert found == [{"a": 1}, {"b": 2}, {"c": 3}, {"d": 4}]


@pytest.mark.parametrize("content", ['[{"a": 1}', '{"a": 1}\n[{"b": 2}', '{"a": 1}]]]', '[{"a": 1}]]'])
def test_brackets_without_a_partner_are_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(ManifestError, match=r"object \d: (ends here, before the end of its JSON|a bracket too many)"):
        list(Manifest(tmp_path / "m.json").objects())


def test_a_manifest_in_one_json_value_may_be_longer_than_lines_but_not_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1 << 16)
    path = tmp_path / "m.json"
    path.write_text("[" + ", ".join(f'{{"audio_filepath": "/data/{number}.wav"}}' for number in range(10_000)) + "]")
    assert sum(1 for _ in Manifest(path).objects()) == 10_000
    monkeypatch.setattr(lines_module, "_MAX_SPREAD_BYTES", path.stat().st_size - 1)
    with pytest.raises(ManifestError, match=r"m\.json: more than 0 MiB in one JSON value\. Write one object per line"):
        next(Manifest(path).objects())
