import json
import re
from pathlib import Path

import numpy as np
import pytest

from nestdata import PrepareConfig, prepare_corpus
from nestdata.prepare.reporting import report
from tests.synthesis import hiss, tone, write_audio, write_jsonl


def report_of(path: Path) -> str:
    return (path / "report.html").read_text()


def test_a_report_shows_hours_labels_rejects_and_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_MAX_NAMES", 30)
    rows = []
    for i in range(40):
        write_audio(tmp_path / f"{i}.wav", hiss(8000 + 700 * i, i))
        rows.append({"audio_filepath": f"{i}.wav", "lang": ("en", "sw")[i % 4 == 0], "speaker": f"<b>s{i}</b>"})
    rows += [{"audio_filepath": "gone & <lost>.wav"}, {"audio_filepath": "0.wav", "offset": 0.4}]
    prepare_corpus(
        [write_jsonl(tmp_path / "speech.json", rows)], tmp_path / "speech.corpus", PrepareConfig(min_seconds=0.2)
    )
    page = report_of(tmp_path / "speech.corpus")
    assert "40 cuts, 0.02 h at 16000 Hz, 0.50 to 2.21 s" in page
    assert "Hours by language" in page
    assert page.index('row" class="name"><bdi>en<') < page.index('row" class="name"><bdi>sw<')  # descending by hours
    assert "&lt;b&gt;s39" in page
    assert "<b>s39" not in page
    assert "<p>and 10 more</p>" in page
    assert "gone &amp; &lt;lost&gt;.wav does not exist" in page
    for reason in ("missing", "too_short"):
        assert f'<th scope="row" class="word">{reason}</th>' in page
    assert "Check the paths" in page
    assert page.count(" %</td>") == 8  # padding and budget used, for four budgets
    assert "://" not in page  # the page loads no other file


def test_the_bars_of_durations_add_up_to_all_hours(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(4000, 90000, 60)
    for i, length in enumerate(lengths):
        write_audio(tmp_path / "speech" / f"{i}.wav", hiss(int(length), i))
    prepare_corpus([tmp_path / "speech"], tmp_path / "speech.corpus")
    hours = [float(value) for value in re.findall(r's: ([\d.]+) h"', report_of(tmp_path / "speech.corpus"))]
    assert len(hours) > 20
    assert abs(sum(hours) - lengths.sum() / 16000 / 3600) < 0.0005 * len(hours)


def test_corpora_of_one_cut_of_equal_cuts_and_of_long_cuts_have_reports(tmp_path: Path) -> None:
    write_audio(tmp_path / "one" / "a.wav", tone(300, 1.0))
    for i in range(9):
        write_audio(tmp_path / "alike" / f"{i}.wav", tone(300, 1.0))
    write_audio(tmp_path / "long" / "a.wav", tone(300, 70.0))
    for name in ("one", "alike", "long"):
        prepare_corpus([tmp_path / name], tmp_path / f"{name}.corpus")
    assert report_of(tmp_path / "one.corpus").count("fewer than plan.microbatches_per_step (8)") == 4
    assert "<p>None.</p>" in report_of(tmp_path / "alike.corpus")
    assert "Hours by" not in report_of(tmp_path / "alike.corpus").replace("Hours by length", "")
    assert "longer than plan.max_batch_seconds allows (60 s)" in report_of(tmp_path / "long.corpus")


def test_file_names_that_are_not_unicode_are_escaped_in_the_report(tmp_path: Path) -> None:
    write_audio(tmp_path / "speech" / "a.wav", tone(300, 1.0))
    (tmp_path / "speech" / "b\udc80.wav").write_bytes(b"")
    prepare_corpus([tmp_path / "speech"], tmp_path / "speech.corpus")
    assert json.loads((tmp_path / "speech.corpus" / "meta.json").read_text())["rejected"] == {"empty": 1}
    assert "b\\udc80.wav" in report_of(tmp_path / "speech.corpus")
