import re
from pathlib import Path

import numpy as np
import pytest

from nestdata import Corpus, PrepareConfig, prepare_corpus
from nestdata.prepare import prepare_report as report
from tests.nestdata.prepare.report_tables import rows_of
from tests.synthesis import chirp, hiss, read_audio, tone, write_audio, write_jsonl

HOSTILE = '"><script>alert(1)</script>'


def report_of(path: Path) -> str:
    return (path / "report.html").read_text()


def test_a_report_shows_hours_labels_and_rejects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_MAX_NAMES", 30)
    rows = []
    for i in range(40):
        write_audio(tmp_path / f"{i}.wav", hiss(8000 + 700 * i, i))
        language = ("en", "sw")[i % 4 == 0] if i < 8 else f"s{i}"
        rows.append({"audio_filepath": f"{i}.wav", "lang": language})
    rows += [{"audio_filepath": "gone.wav"}, {"audio_filepath": "0.wav", "offset": 0.4}]
    prepare_corpus(
        [write_jsonl(tmp_path / "speech.json", rows)], tmp_path / "speech.corpus", PrepareConfig(min_seconds=0.2)
    )
    page = report_of(tmp_path / "speech.corpus")
    assert "40 cuts, 0.02 h at 16000 Hz, 0.50 to 2.21 s" in page
    assert "Hours by language" in page
    assert page.index('row" class="name"><bdi>en<') < page.index('row" class="name"><bdi>sw<')  # descending by hours
    assert "<p>and 4 more</p>" in page
    assert "gone.wav does not exist" in page
    for reason in ("missing", "too_short"):
        assert f'<th scope="row" class="word">{reason}</th>' in page
    assert "Check the paths" in page
    assert "://" not in page  # the page loads no other file


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty cuts of three languages, of 0.5 to 12.2 s, at two rates."""
    folder = tmp_path_factory.mktemp("speech")
    rows = []
    for i in range(40):
        rate = 8000 if i % 2 else 16000
        write_audio(folder / f"{i:02d}.wav", chirp(200, 900, 0.5 + 0.3 * i, rate), rate)
        row = {
            "audio_filepath": f"{i:02d}.wav",
            "lang": ("en", "sw", HOSTILE)[i % 3],
            "text": f"words {i} & <b>more</b>",
        }
        rows.append(row | {"speaker": HOSTILE})
    return write_jsonl(folder / "speech.json", rows)


@pytest.fixture(scope="module")
def corpus(manifest: Path) -> Path:
    prepare_corpus([manifest], manifest.parent / "speech.corpus", PrepareConfig(sampling_rate=8000))
    return manifest.parent / "speech.corpus"


def test_ten_cuts_are_drawn_and_their_beginnings_played(corpus: Path) -> None:
    rows = rows_of(corpus / "report.html", "samples")
    opened = Corpus.open(corpus)
    samples = dict(opened.load(index) for index in range(len(opened)))
    assert len({name.split()[0] for _, name, *_ in rows}) == 10
    for file, name, _, seconds in rows:
        expected = samples[name.split()[0]]
        assert float(seconds) == pytest.approx(len(expected) / 8000, abs=0.005)
        found = read_audio(corpus / file)
        assert len(found) == min(len(expected), 80000)
        # Resampled audio is rounded to 16 bits, and its filter does not see what is after the beginning.
        np.testing.assert_allclose(found[:79900], expected[:79900], rtol=0, atol=1 / 32768)


def test_names_and_texts_are_escaped(corpus: Path) -> None:
    page = report_of(corpus)
    assert "<script>alert" not in page
    assert "&#34;&gt;&lt;script&gt;alert" in page
    assert " &amp; &lt;b&gt;more&lt;/b&gt;" in page
    assert re.findall(r'(?:src|href)="(?!report/\d+\.flac"|#)', page) == []


def test_cuts_that_cannot_be_decoded_are_listed_with_the_error(tmp_path: Path) -> None:
    rows = [{"audio_filepath": f"{i}.wav", "duration": 1.0 + i} for i in range(3)]
    write_audio(tmp_path / "0.wav", tone(300, 1.0))
    (tmp_path / "1.wav").write_text("not audio")
    prepare_corpus([write_jsonl(tmp_path / "m.json", rows)], tmp_path / "m.corpus", PrepareConfig(probe="missing"))
    found = {name: audio for audio, name, *_ in rows_of(tmp_path / "m.corpus" / "report.html", "samples")}
    assert found["0"].endswith(".flac")
    assert found["1"].startswith("no player: cut '1': cannot read")
    assert found["2"].startswith("no player: cut '2': cannot read")
