"""`prepare` with cuts at pauses, and with limits on speech, on real speech; and how cuts are joined from speech."""

import importlib.util
import re
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata import ConfigError, Corpus, ManifestError, PrepareConfig, PrepareProgress, SegmentConfig, prepare_corpus
from nestdata.prepare import divide
from nestdata.prepare.speech import RATE, Span, Speech, detector_name, find_speech, join_speech
from tests.nestdata.prepare.recordings import Recording, joined, needs_vad, utterance
from tests.synthesis import hiss, read_jsonl, write_audio, write_jsonl

# Two groups of utterances, with three seconds of noise before, between and after them.
PAUSES = [3.0, 0.4, 0.6, 3.0, 0.4]
SEGMENTS = PrepareConfig(segment=SegmentConfig())


@pytest.fixture(scope="module")
def talk() -> Recording:
    recording = joined(PAUSES)
    samples = np.concatenate([recording.samples, hiss(2 * RATE, 2, level=1e-3)])
    return Recording(samples, recording.utterances)


@pytest.fixture(scope="module")
def talks(talk: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recording, and with one that has no speech."""
    folder = tmp_path_factory.mktemp("talks")
    write_audio(folder / "talk.flac", talk.samples)
    write_audio(folder / "wind.flac", hiss(6 * RATE, 3))
    return folder


@pytest.fixture(scope="module")
def corpus(talks: Path) -> Corpus:
    output = talks.with_name("talks.corpus")
    prepare_corpus([talks], output, SEGMENTS)
    return Corpus.open(output)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the recordings that are searched for speech, in order."""
    names: list[str] = []

    def search(row: dict[str, Any], content: bytes | None, max_seconds: float) -> Speech:
        names.append(Path(row["id"]).name)
        return find_speech(row, content, max_seconds)

    monkeypatch.setattr(divide, "find_speech", search)
    return names


def interrupt(found: PrepareProgress) -> None:
    if found.entries:
        assert found.hours > 0
        raise KeyboardInterrupt


def rows_of(corpus: Corpus) -> list[dict[str, Any]]:
    return read_jsonl(corpus.path / "cuts.jsonl")


def spans_of(corpus: Corpus) -> list[tuple[float, float]]:
    return [(row["start"], row["start"] + row["duration"]) for row in rows_of(corpus)]


def rejects_of(path: Path) -> dict[str, str]:
    return {row["cut_id"]: row["reason"] for row in read_jsonl(path / "rejected.jsonl")}


def check_spans(spans: list[tuple[float, float]], talk: Recording) -> None:
    """Checks that cuts begin and end outside of utterances, and near them."""
    groups = [talk.utterances[:3], talk.utterances[3:]]
    assert len(spans) == len(groups)
    for (start, end), group in zip(spans, groups, strict=True):
        # 0.3 s of padding, a frame of 0.032 s, and what the detector takes for the beginning or end of speech.
        assert group[0][0] - 0.6 <= start <= group[0][0] + 0.1
        assert group[-1][1] - 0.1 <= end <= group[-1][1] + 0.8


@needs_vad
def test_recordings_are_cut_at_long_pauses_and_non_speech_is_counted(corpus: Corpus, talk: Recording) -> None:
    check_spans(spans_of(corpus), talk)
    for row, (start, end) in zip(rows_of(corpus), spans_of(corpus), strict=True):
        assert row["id"] == f"talk@{start:.3f}+{end - start:.3f}"
    assert rejects_of(corpus.path) == {"wind": "no_speech"}
    speech = {**corpus.meta["speech"]}
    assert re.fullmatch(r"silero-vad 6\.\d+\.\d+", speech.pop("detector"))
    assert speech["searched_hours"] == pytest.approx((len(talk.samples) + 6 * RATE) / RATE / 3600, abs=1e-9)
    assert 0.5 * corpus.hours < speech["speech_hours"] < corpus.hours
    page = (corpus.path / "report.html").read_text()
    assert re.search(r"speech found by silero-vad 6\S+: \d\.\d\d of \d\.\d\d h", page)
    assert "No speech was found: these are pauses, music or noise" in page


@needs_vad
@pytest.mark.multiprocess
def test_files_members_and_any_number_of_processes_give_the_same_cuts(
    corpus: Corpus, talks: Path, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "talks.tar", "w") as tar:
        for path in sorted(talks.iterdir()):
            tar.add(path, path.name)
    prepare_corpus([tmp_path / "talks.tar"], tmp_path / "members.corpus", SEGMENTS, jobs=2)
    members = Corpus.open(tmp_path / "members.corpus")
    assert members.meta["fingerprint"] == corpus.meta["fingerprint"]
    assert members.meta["speech"] == corpus.meta["speech"]
    np.testing.assert_array_equal(members.load(1)[1], corpus.load(1)[1])


@needs_vad
def test_a_channel_of_another_rate_is_cut_at_the_same_places(talk: Recording, tmp_path: Path) -> None:
    stereo = np.stack([np.zeros_like(talk.samples), talk.samples], axis=1).repeat(3, axis=0)
    path = write_audio(tmp_path / "a.wav", stereo, 3 * RATE)
    manifest = write_jsonl(tmp_path / "a.json", [{"audio_filepath": path.name, "text": "all", "lang": "en"}])
    for channel in (1, "mix"):
        prepare_corpus(
            [manifest], tmp_path / "a.corpus", PrepareConfig(segment=SegmentConfig(), channel=channel), overwrite=True
        )
        found = Corpus.open(tmp_path / "a.corpus")
        check_spans(spans_of(found), talk)
        assert rows_of(found)[0]["supervisions"][0]["language"] == "en"
        assert "text" not in rows_of(found)[0]["supervisions"][0]
        assert ("custom" in rows_of(found)[0]) == (channel == "mix")
    with pytest.raises(
        ManifestError, match=r"no usable cut among 1 entries \(1 no_speech\); .*: no_speech, no speech in"
    ):
        prepare_corpus([manifest], tmp_path / "b.corpus", SEGMENTS)


@needs_vad
def test_cuts_with_little_speech_are_left_out(tmp_path: Path) -> None:
    clean = np.concatenate([hiss(RATE, 1, level=1e-3), utterance(2)])
    audio = {
        "clean": clean,
        "sparse": np.concatenate([clean, hiss(20 * RATE, 3, level=1e-3)]),
        "noise": hiss(2 * RATE, 4),
    }
    for name, samples in audio.items():
        write_audio(tmp_path / "speech" / f"{name}.wav", samples)
    report = prepare_corpus([tmp_path / "speech"], tmp_path / "speech.corpus", PrepareConfig(min_speech_share=0.3))
    (row,) = rows_of(Corpus.open(report.path))
    assert (row["id"], row["start"], row["duration"]) == ("clean", 0.0, len(clean) / RATE)
    assert rejects_of(report.path) == {"sparse": "little_speech", "noise": "no_speech"}
    assert report.searched_hours == pytest.approx(sum(map(len, audio.values())) / RATE / 3600)


@needs_vad
@pytest.mark.parametrize("damage", ["cut off", "zeros inside"])
def test_audio_before_damage_is_used(
    talk: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    path, seconds = write_audio(tmp_path / "talks" / "a.flac", talk.samples), len(talk.samples) / RATE
    content = path.read_bytes()
    begin = content[: len(content) * 3 // 4]
    path.write_bytes(begin if damage == "cut off" else begin + bytes(50) + content[len(begin) + 50 :])
    monkeypatch.setattr("nestdata.prepare.speech._BLOCK_SECONDS", 1.0)
    config = PrepareConfig(segment=SegmentConfig(min_seconds=1.0, max_seconds=2.0))
    output = prepare_corpus([path.parent], tmp_path / "a.corpus", config).path
    spans = spans_of(Corpus.open(output))
    assert spans[0][0] == pytest.approx(talk.utterances[0][0], abs=0.6)
    if damage == "cut off":
        assert rejects_of(output) == {}
        (note,) = read_jsonl(output / "notes.jsonl")
        assert note["kind"] == "ends_early"
        end = float(note["detail"].removesuffix(" s").rpartition(" ")[2])
    else:
        (reject,) = read_jsonl(output / "rejected.jsonl")
        assert reject["reason"] in ("truncated", "unreadable")
        end, duration = map(float, reject["cut_id"].removeprefix("a@").split("+"))
        assert end + duration == pytest.approx(seconds, abs=0.001)
        assert reject["detail"].startswith(f"decoded up to {end:.1f} s: ")
    assert 0.3 * seconds < spans[-1][1] <= end + 0.05


@needs_vad
def test_results_of_searched_files_are_kept_when_a_run_is_interrupted(
    talks: Path, corpus: Corpus, tmp_path: Path, searched: list[str]
) -> None:
    output = tmp_path / "talks.corpus"
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus([talks], output, SEGMENTS, on_progress=interrupt)
    assert searched == ["talk"]
    searched.clear()
    prepare_corpus([talks], output, SEGMENTS)
    assert searched == ["wind"]
    again = Corpus.open(output)
    assert again.meta["fingerprint"] == corpus.meta["fingerprint"]
    assert again.meta["speech"] == corpus.meta["speech"]
    searched.clear()
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus([talks], output, SEGMENTS, overwrite=True, on_progress=interrupt)
    other = PrepareConfig(segment=SegmentConfig(min_seconds=60.0, max_seconds=60.0, max_pause=5.0))
    prepare_corpus([talks], output, other, overwrite=True)
    assert searched == ["talk", "talk", "wind"]
    assert len(Corpus.open(output)) == 1


CONFIG = SegmentConfig(min_seconds=5.0, max_seconds=20.0, max_pause=2.0, padding_seconds=0.25)


def cuts_of(*seconds: tuple[float, float], total: float = 100.0) -> list[tuple[float, float]]:
    spans = [(round(start * RATE), round(end * RATE)) for start, end in seconds]
    return [(start / RATE, end / RATE) for start, end in join_speech(Speech(spans, round(total * RATE), None), CONFIG)]


def test_speech_is_joined_until_it_is_long_enough() -> None:
    assert cuts_of((1, 3), (4, 7), (8, 14)) == [(0.75, 7.25), (7.75, 14.25)]
    assert cuts_of((1, 3), (5.5, 12)) == [(0.75, 3.25), (5.25, 12.25)]  # the pause is too long


def test_speech_that_stays_short_is_joined_with_the_one_before() -> None:
    assert cuts_of((1, 7), (8, 9)) == [(0.75, 9.25)]
    assert cuts_of((1, 20), (20.5, 21)) == [(0.75, 20.25), (20.25, 21.25)]  # longer than a cut may be


def test_padding_ends_at_the_middle_of_a_pause_and_at_the_ends_of_a_recording() -> None:
    assert cuts_of((0.1, 6), (6.2, 12), total=12.1) == [(0.0, 6.1), (6.1, 12.1)]
    assert cuts_of() == []


@given(
    gaps=st.lists(st.tuples(st.integers(0, 3 * RATE), st.integers(1, 19 * RATE)), max_size=30),
    end=st.integers(0, RATE),
    padding=st.sampled_from([0.0, 0.25]),
)
def test_cuts_hold_all_speech_in_order_and_within_limits(gaps: list[tuple[int, int]], end: int, padding: float) -> None:
    spans, position = list[Span](), 0
    for gap, length in gaps:
        spans.append((position + gap, position + gap + length))
        position += gap + length
    found = Speech(spans, position + end, None)
    cuts = join_speech(found, SegmentConfig(min_seconds=5.0, max_seconds=20.0, padding_seconds=padding))
    assert all(0 <= start < stop <= found.num_samples and stop - start <= 20 * RATE for start, stop in cuts)
    assert all(before[1] <= after[0] for before, after in pairwise(cuts))
    assert sum(found.within(*cut) for cut in cuts) == sum(stop - start for start, stop in spans)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "silero_vad" else object())
    with pytest.raises(ConfigError, match=r"silero-vad .*`pip install 'nest-pretrain\[vad\]'`"):
        detector_name()
