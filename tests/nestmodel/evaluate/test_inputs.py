import json
from pathlib import Path

from nestmodel import RejectedUtterance
from nestmodel.evaluate.inputs import RejectLog, cut_labels
from tests.synthesis import folder_corpus, hiss


def test_rejects_are_written_and_counted_once_beside_those_of_the_corpus(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"good.wav": hiss(16000, 0), "short.wav": hiss(100, 1)})
    with RejectLog(tmp_path) as rejects:
        rejects.copy_from(corpus)
        assert rejects.first is None
        for cut_id, reason in (("a", "missing"), ("ö", "truncated"), ("a", "missing"), ("c", "truncated")):
            rejects.add(RejectedUtterance(f"{cut_id}.wav", cut_id, reason, "3 of 5 samples"))
    assert rejects.first == ("a.wav", "a", "missing", "3 of 5 samples")  # the first that was added, not copied
    assert rejects.counts == {"truncated": 2, **corpus.meta["rejected"], "missing": 1}
    lines = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["cut_id"] for line in lines] == ["short", "a", "ö", "c"]
    assert lines[1] == {"where": "a.wav", "cut_id": "a", "reason": "missing", "detail": "3 of 5 samples"}


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
