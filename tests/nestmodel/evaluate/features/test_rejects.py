import json
from pathlib import Path

import pytest

from nestdata import Corpus
from nestmodel import RejectedUtterance
from nestmodel.evaluate.features.rejects import RejectLog
from tests.synthesis import folder_corpus, hiss


def rejected(cut_id: str, reason: str) -> RejectedUtterance:
    return RejectedUtterance(where=f"{cut_id}.wav", cut_id=cut_id, reason=reason, detail="3 of 5 samples")


def lines_of(directory: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (directory / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]


def test_each_utterance_is_written_and_counted_once(tmp_path: Path) -> None:
    with RejectLog(tmp_path) as rejects:
        assert rejects.first is None
        for cut_id, reason in (("a", "missing"), ("ö", "truncated"), ("a", "missing"), ("c", "truncated")):
            rejects.add(rejected(cut_id, reason))
    assert rejects.first == rejected("a", "missing")
    assert list(rejects.counts.items()) == [("truncated", 2), ("missing", 1)]
    assert [line["cut_id"] for line in lines_of(tmp_path)] == ["a", "ö", "c"]
    assert lines_of(tmp_path)[0] == {"where": "a.wav", "cut_id": "a", "reason": "missing", "detail": "3 of 5 samples"}


def test_rejects_of_a_corpus_come_with_their_counts(tmp_path: Path) -> None:
    corpus: Corpus = folder_corpus(tmp_path / "speech", {"good.wav": hiss(16000, 0), "short.wav": hiss(100, 1)})
    with RejectLog(tmp_path) as rejects:
        rejects.copy_from(corpus)
        rejects.add(rejected("a", "missing"))
    assert rejects.counts == {**corpus.meta["rejected"], "missing": 1}
    assert sum(rejects.counts.values()) == len(lines_of(tmp_path)) == 2
    assert rejects.first == rejected("a", "missing")  # the first that was added, not copied


def test_a_log_without_rejects_is_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RejectLog(tmp_path):
        raise KeyboardInterrupt
    assert lines_of(tmp_path) == []
