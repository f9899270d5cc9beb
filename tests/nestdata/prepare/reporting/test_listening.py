"""Samples in the report: groups, keys, bounds, escaping, and equal pages for any number of processes."""

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nestdata import ConfigError, Corpus, PrepareConfig, prepare_corpus
from nestdata.prepare.reporting import listening
from nestdata.prepare.reporting import report as report_module
from nestdata.prepare.reporting.listening import ListeningConfig, Sample
from nestdata.prepare.reporting.sound import Sound, read_sound
from nestdata.prepare.writing.found import AudioSpan
from tests.nestdata.prepare.reporting.report_tables import Row, rows_of
from tests.shards import tar_corpus
from tests.synthesis import chirp, hiss, read_audio, tone, write_audio, write_jsonl

HOSTILE = '"><script>alert(1)</script>'


def names(rows: list[Row], group: str) -> list[str]:
    return [row[2].split()[0] for row in rows if row[0] == group]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty cuts of three languages, of 0.5 to 12.2 s, and bad ones; levels fall with the number of the file."""
    folder = tmp_path_factory.mktemp("speech")
    rows: list[dict[str, Any]] = []
    for i in range(40):
        samples = chirp(200, 900, 0.5 + 0.3 * i, 8000, level=0.9 * 0.9**i)
        if i in (3, 17):
            samples = np.clip(samples * 40, -1, 1)
        if i == 30:
            samples *= 0
        write_audio(folder / f"{i:02d}.wav", samples, 8000)
        rows.append({"audio_filepath": f"{i:02d}.wav", "lang": ("en", "sw", HOSTILE)[0 if i < 30 else 1 + (i == 39)]})
        rows[-1] |= {"text": f"words of {i} & <b>more</b>", "speaker": HOSTILE}
    (folder / "text.wav").write_text("not audio")
    write_audio(folder / "cut.wav", tone(300, 0.05))
    rows += [{"audio_filepath": name} for name in ("gone.wav", "text.wav", "cut.wav", "00.wav")]
    return write_jsonl(folder / "speech.json", rows)


@pytest.fixture(scope="module")
def corpus(manifest: Path) -> Path:
    path = manifest.parent / "speech.corpus"
    prepare_corpus([manifest], path)
    return path


def test_the_groups_are_the_extremes_the_languages_and_the_reasons(corpus: Path) -> None:
    rows = rows_of(corpus / "report.html", "samples")
    assert names(rows, "shortest") == ["00", "01", "02"]
    assert names(rows, "longest") == ["39", "38", "37"]
    assert names(rows, "loudest") == ["03", "17", "00"]
    assert names(rows, "quietest") == ["30", "39", "38"]
    assert sorted(names(rows, "clipped")) == ["03", "17"]
    assert {len(set(names(rows, f"language: {name}"))) for name in ("en", "sw")} == {3}
    assert set(names(rows, "language: en")) <= {f"{i:02d}" for i in range(30)}
    assert names(rows, f"language: {HOSTILE}") == ["39"]
    rejects = rows_of(corpus / "report.html", "rejected samples")
    assert sorted(row[0] for row in rejects) == ["duplicate_id", "missing", "too_short", "unreadable"]


def test_levels_of_the_first_ten_seconds_are_shown(corpus: Path) -> None:
    rows = {row[2].split()[0]: row for row in rows_of(corpus / "report.html", "samples")}
    assert rows["30"][3:] == ["9.50", "-∞", "-∞", "0.00"]
    assert [rows["00"][3], rows["00"][4], rows["00"][6]] == ["0.50", "-3.9", "0.00"]
    assert float(rows["03"][6]) > 90
    assert "among 40 of 40 cuts" in (corpus / "report.html").read_text()


def test_players_play_the_beginning_of_the_cut(corpus: Path) -> None:
    for row in rows_of(corpus / "report.html", "samples"):
        name = row[2].split()[0]
        samples, rate = soundfile.read(corpus / row[1], dtype="float32")
        assert rate == 8000
        assert np.array_equal(samples, read_audio(corpus.parent / f"{name}.wav")[:80000])


def test_rejects_are_played_if_they_can_be_decoded(corpus: Path) -> None:
    rows = {row[0]: row for row in rows_of(corpus / "report.html", "rejected samples")}
    assert rows["missing"][1] == "no player: no such file"
    assert rows["unreadable"][1] == "no player: Format not recognised."
    assert len(read_audio(corpus / rows["too_short"][1])) == 800
    assert np.array_equal(read_audio(corpus / rows["duplicate_id"][1]), read_audio(corpus.parent / "00.wav"))


def test_names_and_texts_are_escaped(corpus: Path) -> None:
    page = (corpus / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&#34;&gt;&lt;script&gt;alert" in page
    assert "words of 0 &amp; &lt;b&gt;more&lt;/b&gt;" in page
    assert re.findall(r'(?:src|href)="(?!report/\d+\.flac"|#)', page) == []


def test_the_page_and_its_audio_do_not_depend_on_the_number_of_processes(manifest: Path, corpus: Path) -> None:
    other = manifest.parent / "jobs" / "speech.corpus"
    prepare_corpus([manifest], other, jobs=2)
    paths = [Path("report.html"), *(path.relative_to(corpus) for path in sorted((corpus / "report").iterdir()))]
    assert [path.relative_to(other) for path in sorted((other / "report").iterdir())] == paths[1:]
    assert len(paths) == 14
    assert [path for path in paths if (corpus / path).read_bytes() != (other / path).read_bytes()] == []


def test_the_audio_is_bounded_and_every_kind_has_its_turn(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "MAX_FILES", 12)
    read: list[AudioSpan] = []

    def count(span: AudioSpan) -> Sound:
        read.append(span)
        return read_sound(span)

    monkeypatch.setattr(listening, "read_sound", count)
    prepare_corpus([manifest], tmp_path / "speech.corpus", PrepareConfig(report_samples=20))
    # 40 are measured. Three of the rejects, which have no sound, have their turn before the twelfth file.
    assert len(read) <= 40 + 12 + 3
    page = tmp_path / "speech.corpus" / "report.html"
    assert len(list((tmp_path / "speech.corpus" / "report").iterdir())) == 12
    assert "more samples were left out" in page.read_text()
    groups = {row[0] for row in rows_of(page, "samples")}
    assert groups >= {"shortest", "longest", "loudest", "quietest", "clipped", "language: en", "language: sw"}


def test_a_report_without_samples_has_no_audio_and_decodes_none(manifest: Path, tmp_path: Path) -> None:
    prepare_corpus([manifest], tmp_path / "speech.corpus", PrepareConfig(report_samples=0))
    assert not (tmp_path / "speech.corpus" / "report").exists()
    page = (tmp_path / "speech.corpus" / "report.html").read_text()
    assert "<audio" not in page
    assert 'data-tools="reasons"' in page


@pytest.mark.parametrize("number", [-1, 21])
def test_a_number_of_samples_out_of_range_is_an_error(number: int) -> None:
    with pytest.raises(ConfigError, match="report_samples"):
        PrepareConfig(report_samples=number)


def test_members_of_tars_are_played(tmp_path: Path) -> None:
    for i in range(5):
        write_audio(tmp_path / "speech" / f"{i}.flac", hiss(8000 + 900 * i, i))
    corpus = tar_corpus(tmp_path / "speech")
    rows = rows_of(corpus.path / "report.html", "samples")
    (longest,) = [row for row in rows if row[0] == "longest"][:1]
    assert np.array_equal(read_audio(corpus.path / longest[1]), read_audio(tmp_path / "speech" / "4.flac"))


def test_cuts_that_cannot_be_decoded_are_listed_with_the_error(tmp_path: Path) -> None:
    rows = [{"audio_filepath": f"{i}.wav", "duration": 1.0 + i} for i in range(4)]
    write_audio(tmp_path / "0.wav", tone(300, 1.0))
    (tmp_path / "1.wav").write_text("not audio")
    prepare_corpus([write_jsonl(tmp_path / "m.json", rows)], tmp_path / "m.corpus", PrepareConfig(probe="missing"))
    page = tmp_path / "m.corpus" / "report.html"
    assert "among 4 of 4 cuts, of which 3 could not be decoded" in page.read_text()
    failed = {row[2]: row[1] for row in rows_of(page, "samples") if row[0] == "not decodable"}
    missing = "no player: no such file"
    assert failed == {"1": "no player: Format not recognised.", "2": missing, "3": missing}


def test_a_store_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answers = list[str](), threading.Event()

    def read(span: AudioSpan) -> Sound:
        begun.append(span.location)
        if span.location.startswith("https:"):
            answers.wait()
        return Sound(tone(300, 0.1), 16000)

    monkeypatch.setattr(listening, "read_sound", read)
    monkeypatch.setattr(listening, "MAX_STORE_SECONDS", 0.2)
    places = [*(f"https://store.invalid/{i}.wav" for i in range(100)), "/speech/local.wav"]
    requests = [
        listening._Request(Sample(group="", name=place, detail=""), AudioSpan(place, None, 0.0, None, 0), None)
        for place in places
    ]
    config = ListeningConfig(per_group=3, directory=tmp_path, stored_in=tmp_path, is_probed=True)
    *late, local = listening._sounds(config, requests)
    answers.set()
    assert set(late) == {"the store did not send it within 0.2 s"}
    assert isinstance(local, Sound)
    assert len(begun) <= 32 + 1  # requests at a time, and the local file


def test_audio_of_a_rate_that_flac_does_not_have_is_listed_without_a_player(tmp_path: Path) -> None:
    write_audio(tmp_path / "data" / "a.wav", hiss(16000, 1))
    write_audio(tmp_path / "data" / "odd.wav", hiss(70000, 2), 65537)
    report = prepare_corpus([tmp_path / "data"], tmp_path / "speech.corpus")
    assert report.num_cuts == 2
    rows = rows_of(tmp_path / "speech.corpus" / "report.html", "samples")
    assert {row[1] for row in rows if row[2].startswith("odd")} == {"no player: FLAC cannot be written at 65537 Hz"}
    assert len(list((tmp_path / "speech.corpus" / "report").iterdir())) == 1


def test_a_failure_of_the_samples_or_of_the_page_does_not_fail_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a <bug>")

    write_audio(tmp_path / "data" / "a.wav", hiss(16000, 1))
    monkeypatch.setattr(listening, "_copy", fail)
    assert prepare_corpus([tmp_path / "data"], tmp_path / "a.corpus").num_cuts == 1
    page = (tmp_path / "a.corpus" / "report.html").read_text()
    assert "There are no samples, because copying them failed: <bdi>ZeroDivisionError: a &lt;bug&gt;</bdi>" in page
    assert "Hours by length of the cut" in page
    assert not (tmp_path / "a.corpus" / "report").exists()
    monkeypatch.setattr(report_module, "write_page", fail)
    assert prepare_corpus([tmp_path / "data"], tmp_path / "b.corpus").num_cuts == 1
    page = (tmp_path / "b.corpus" / "report.html").read_text()
    assert "b.corpus: the report cannot be written (ZeroDivisionError: a &lt;bug&gt;). The corpus is complete." in page
    assert [record.getMessage().partition("(")[0].rpartition("/")[2] for record in caplog.records] == [
        "a.corpus: the report has no samples to listen to ",
        "b.corpus: the report has no samples to listen to ",
        "b.corpus: the report cannot be written ",
    ]
    assert len(Corpus.open(tmp_path / "b.corpus")) == 1
