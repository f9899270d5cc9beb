from pathlib import Path

import pytest

from nestdata import ManifestError
from tests.nestdata.prepare.inputs.reading import entries_of, prepared, some_audio


def table(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_each_row_of_file_begin_and_end_is_a_span(tmp_path: Path) -> None:
    some_audio(tmp_path / "wavs" / "a.wav")
    rows = ["wavs/a.wav,0,0.25", "wavs/a.wav,0.25,0.5", "wavs/a.wav,,0.375", "wavs/a.wav,,"]
    cuts, rejects = prepared(table(tmp_path / "m.csv", "\n".join(["file,begin,end", *rows])), min_seconds=0.1)
    assert rejects == []
    assert {cut_id: (cut["start"], cut["duration"], cut.get("custom")) for cut_id, cut in cuts.items()} == {
        "wavs/a@0.000+0.250": (0.0, 0.25, None),
        "wavs/a@0.250+0.250": (0.25, 0.25, None),
        "wavs/a@0.000+0.375": (0.0, 0.375, None),
        "wavs/a": (0.0, 0.5, None),
    }


def test_quoted_fields_hold_delimiters_and_lines(tmp_path: Path) -> None:
    path = table(tmp_path / "m.csv", 'path,text\n"a, b.wav","one\ntwo ""three"""\n\n,\nc.wav,x\npath,text\nd.wav,y\n')
    entries = entries_of(path)
    assert [(entry.cut_id, entry.where) for entry in entries] == [
        ("a, b", f"{path}:3"), ("c", f"{path}:6"), ("d", f"{path}:8"),
    ]  # fmt: skip
    assert entries[0].labels == {"text": 'one\ntwo "three"'}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            'a.wav,1,"x\nb.wav,1,y\nc.wav",1,z',
            r"m\.csv:4: 5 fields, .* row of several lines .* quotation mark is missing",
        ),
        ("wavs/,1,x", r"m\.csv:2: path is 'wavs/'"),
        ("a.wav,long,x", r"m\.csv:2: duration is 'long'\. Give seconds as a number"),
        ('a.wav,1,"' + 200_000 * "x", r"m\.csv:2: field larger than field limit .* quotation mark is missing"),
    ],
)
def test_a_bad_row_is_an_error_that_names_its_line(tmp_path: Path, row: str, message: str) -> None:
    path = table(tmp_path / "m.csv", f"path,duration,text\n{row}\n")
    with pytest.raises(ManifestError, match=message):
        entries_of(path)


def test_nothing_in_a_table_is_run(tmp_path: Path) -> None:
    some_audio(tmp_path / "a.wav")
    command = f"touch {tmp_path}/ran |"
    path = table(tmp_path / "m.csv", f"path,text\n{command},x\n$(touch {tmp_path}/ran),x\na.wav,=cmd\n")
    cuts, rejects = prepared(path)
    assert [*cuts, *(reject["reason"] for reject in rejects)] == ["a", "missing", "missing"]
    assert not (tmp_path / "ran").exists()


def test_a_slice_gives_the_span_whatever_other_columns_look_like(tmp_path: Path) -> None:
    some_audio(tmp_path / "a.wav")
    cuts, _ = prepared(table(tmp_path / "m.csv", "path,end_of_turn\na.wav:100:4000,3\n"))
    (cut,) = cuts.values()
    assert (cut["start"], cut["duration"], cut["custom"]) == (100 / 16000, 4000 / 16000, {"end_of_turn": "3"})
