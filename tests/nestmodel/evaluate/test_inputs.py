import json
from pathlib import Path

from nestmodel import RejectedUtterance
from nestmodel.evaluate.inputs import RejectLog, cut_labels


def test_rejects_are_written_and_counted_once(tmp_path: Path) -> None:
    rejects = RejectLog()
    for cut_id, reason in (("a", "missing"), ("ö", "truncated"), ("a", "missing"), ("c", "truncated")):
        rejects.add(RejectedUtterance(f"{cut_id}.wav", cut_id, reason, "3 of 5 samples"))
    assert rejects.last == ("c.wav", "c", "truncated", "3 of 5 samples")
    assert rejects.counts == {"truncated": 2, "missing": 1}
    rejects.write(tmp_path / "rejected.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["cut_id"] for line in lines] == ["a", "ö", "c"]
    assert lines[0] == {"where": "a.wav", "cut_id": "a", "reason": "missing", "detail": "3 of 5 samples"}


def test_labels_are_custom_fields_and_fields_with_one_value_in_all_supervisions() -> None:
    span = {"id": "a", "recording_id": "a", "start": 0.0, "duration": 1.0, "channel": 0}
    cut = {
        "custom": {"lang_family": "romance", "age": 7},
        "supervisions": [
            {**span, "speaker": "kim", "text": "one", "custom": {"mood": "glad"}},
            {**span, "speaker": "kim", "text": "two"},
        ],
    }
    assert cut_labels(cut) == {"lang_family": "romance", "age": 7, "speaker": "kim"}
    assert cut_labels({"supervisions": []}) == {}
