import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile

from nestdata import ConfigError, Corpus, PrepareConfig, prepare_corpus
from nestdata.prepare import report
from tests.nestdata.prepare.report_tables import rows_of
from tests.shards import tar_corpus
from tests.synthesis import chirp, hiss, read_audio, tone, write_audio, write_jsonl

HOSTILE = '"><script>alert(1)</script>'


def report_of(path: Path) -> str:
    return (path / "report.html").read_text()


def test_a_report_shows_hours_labels_and_rejects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_MAX_NAMES", 30)
    rows = []
    for i in range(40):
        write_audio(tmp_path / f"{i}.wav", hiss(8000 + 700 * i, i))
        language = ("en", "sw")[i % 4 == 0] if i < 8 else f"<b>s{i}</b>"
        rows.append({"audio_filepath": f"{i}.wav", "lang": language})
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
    assert "<p>and 4 more</p>" in page
    assert "gone &amp; &lt;lost&gt;.wav does not exist" in page
    for reason in ("missing", "too_short"):
        assert f'<th scope="row" class="word">{reason}</th>' in page
    assert "Check the paths" in page
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
    assert "1 cuts, 0.00 h" in report_of(tmp_path / "one.corpus")
    assert "<p>None.</p>" in report_of(tmp_path / "alike.corpus")
    assert "Hours by language" not in report_of(tmp_path / "alike.corpus")
    assert len(soundfile.read(next((tmp_path / "long.corpus" / "report").iterdir()))[0]) == 10 * 16000


def test_file_names_that_are_not_unicode_are_escaped_in_the_report(tmp_path: Path) -> None:
    write_audio(tmp_path / "speech" / "a.wav", tone(300, 1.0))
    (tmp_path / "speech" / "b\udc80.wav").write_bytes(b"")
    prepare_corpus([tmp_path / "speech"], tmp_path / "speech.corpus")
    assert json.loads((tmp_path / "speech.corpus" / "meta.json").read_text())["rejected"] == {"empty": 1}
    assert "b\\udc80.wav" in report_of(tmp_path / "speech.corpus")


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


def test_hours_by_sampling_rate_are_shown(corpus: Path) -> None:
    hours = {row[0]: float(row[1]) for row in rows_of(corpus / "report.html", "rates")}
    assert hours.keys() == {"8000 Hz", "16000 Hz"}
    assert sum(hours.values()) == pytest.approx(Corpus.open(corpus).hours, rel=0.01)  # rounded to three digits


def test_names_and_texts_are_escaped(corpus: Path) -> None:
    page = report_of(corpus)
    assert "<script>alert" not in page
    assert "&#34;&gt;&lt;script&gt;alert" in page
    assert " &amp; &lt;b&gt;more&lt;/b&gt;" in page
    assert re.findall(r'(?:src|href)="(?!report/\d+\.flac"|#)', page) == []


@pytest.mark.multiprocess
def test_the_page_and_its_audio_do_not_depend_on_the_number_of_processes(manifest: Path, corpus: Path) -> None:
    other = manifest.parent / "jobs" / "speech.corpus"
    prepare_corpus([manifest], other, PrepareConfig(sampling_rate=8000), jobs=2)
    paths = [Path("report.html"), *(path.relative_to(corpus) for path in sorted((corpus / "report").iterdir()))]
    assert len(paths) == 11
    assert [path for path in paths if (corpus / path).read_bytes() != (other / path).read_bytes()] == []


def test_a_report_without_samples_has_no_audio_and_decodes_none(tmp_path: Path) -> None:
    write_audio(tmp_path / "data" / "a.wav", hiss(16000, 1))
    prepare_corpus([tmp_path / "data"], tmp_path / "a.corpus", PrepareConfig(report_samples=0))
    assert not (tmp_path / "a.corpus" / "report").exists()
    assert "<audio" not in report_of(tmp_path / "a.corpus")


@pytest.mark.parametrize("number", [-1, 101])
def test_a_number_of_samples_out_of_range_is_an_error(number: int) -> None:
    with pytest.raises(ConfigError, match="report_samples"):
        PrepareConfig(report_samples=number)


def test_members_of_tars_are_played(tmp_path: Path) -> None:
    write_audio(tmp_path / "speech" / "4.flac", hiss(8000, 4))
    corpus = tar_corpus(tmp_path / "speech")
    ((file, *_),) = rows_of(corpus.path / "report.html", "samples")
    np.testing.assert_array_equal(read_audio(corpus.path / file), read_audio(tmp_path / "speech" / "4.flac"))


def test_cuts_that_cannot_be_decoded_are_listed_with_the_error(tmp_path: Path) -> None:
    rows = [{"audio_filepath": f"{i}.wav", "duration": 1.0 + i} for i in range(3)]
    write_audio(tmp_path / "0.wav", tone(300, 1.0))
    (tmp_path / "1.wav").write_text("not audio")
    prepare_corpus([write_jsonl(tmp_path / "m.json", rows)], tmp_path / "m.corpus", PrepareConfig(probe="missing"))
    found = {name: audio for audio, name, *_ in rows_of(tmp_path / "m.corpus" / "report.html", "samples")}
    assert found["0"].endswith(".flac")
    assert found["1"].startswith("no player: cut '1': cannot read")
    assert found["2"].startswith("no player: cut '2': cannot read")


def test_audio_of_a_rate_that_flac_does_not_have_is_listed_without_a_player(tmp_path: Path) -> None:
    write_audio(tmp_path / "data" / "odd.wav", hiss(70000, 2), 65537)
    prepare_corpus([tmp_path / "data"], tmp_path / "a.corpus", PrepareConfig(sampling_rate=65537))
    ((audio, *_),) = rows_of(tmp_path / "a.corpus" / "report.html", "samples")
    assert audio == "no player: FLAC cannot be written at 65537 Hz"


def test_a_failure_of_the_page_does_not_fail_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a <bug>")

    write_audio(tmp_path / "data" / "a.wav", hiss(16000, 1))
    monkeypatch.setattr(report, "write_page", fail)
    assert prepare_corpus([tmp_path / "data"], tmp_path / "b.corpus").num_cuts == 1
    page = report_of(tmp_path / "b.corpus")
    assert "b.corpus: the report cannot be written (ZeroDivisionError: a &lt;bug&gt;). The corpus is complete." in page
    assert "b.corpus: the report cannot be written" in caplog.text
    assert len(Corpus.open(tmp_path / "b.corpus")) == 1
