"""Local files that are replaced after a corpus was prepared are noticed."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nestdata import AudioError, Corpus, PrepareConfig, prepare_corpus, verify_corpus
from nestdata.storage import FileVersion
from tests.synthesis import chirp, hiss, write_audio, write_jsonl

SPEECH = chirp(100, 3000, 1.0)


def longer(path: Path) -> None:
    write_audio(path, chirp(100, 3000, 2.0))


def at_8_khz(path: Path) -> None:
    write_audio(path, chirp(100, 3000, 1.0, 8000), 8000)


def stereo_with_a_silent_channel(path: Path) -> None:
    write_audio(path, np.stack([0 * SPEECH, SPEECH], axis=1))


def of_the_same_size(path: Path) -> None:
    size = path.stat().st_size
    write_audio(path, hiss(16000, 1))
    assert path.stat().st_size == size


def set_time(path: Path, seconds: int) -> None:
    os.utime(path, (seconds, seconds))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """A corpus of two files, the first of which lasts 1 s; both are of the year 2001."""
    for name, samples in (("a.wav", SPEECH), ("b.wav", hiss(20000, 0))):
        set_time(write_audio(tmp_path / "in" / name, samples), 1_000_000_000)
    prepare_corpus([tmp_path / "in"], tmp_path / "in.corpus")
    return Corpus.open(tmp_path / "in.corpus")


def first_path(corpus: Corpus) -> Path:
    return Path(corpus.line(0)["recording"]["sources"][0]["source"])


REPLACED = [longer, at_8_khz, stereo_with_a_silent_channel, of_the_same_size]


@pytest.mark.parametrize("replace", REPLACED)
def test_a_replaced_file_is_not_used(corpus: Corpus, replace: Callable[[Path], None]) -> None:
    replace(first_path(corpus))
    with pytest.raises(
        AudioError, match=r"a\.wav has changed since the corpus was prepared.*another (size|mod)"
    ) as caught:
        corpus.load(0)
    assert caught.value.reason == "changed"
    corpus.load(1)
    (problem,) = verify_corpus(corpus.path).problems
    assert (problem.location, problem.kind) == (str(first_path(corpus)), "changed")


@pytest.mark.parametrize("replace", REPLACED[:3])
def test_only_a_file_of_the_same_length_rate_and_channels_is_accepted(
    corpus: Corpus, replace: Callable[[Path], None]
) -> None:
    replace(first_path(corpus))
    report = verify_corpus(corpus.path, accept_changed=True)
    (problem,) = report.problems
    assert problem.kind == "changed"
    assert "cannot be accepted" in problem.detail
    assert report.num_accepted == 0
    with pytest.raises(AudioError):
        Corpus.open(corpus.path).load(0)


def test_files_that_were_copied_are_accepted_as_they_are(corpus: Corpus) -> None:
    _, before = corpus.load(0)
    set_time(first_path(corpus), 1_100_000_000)
    with pytest.raises(AudioError, match="--accept-changed"):
        corpus.load(0)
    report = verify_corpus(corpus.path, accept_changed=True)
    assert (report.problems, report.num_accepted) == ([], 1)
    again = Corpus.open(corpus.path)
    np.testing.assert_array_equal(again.load(0)[1], before)
    assert again.fingerprint == corpus.fingerprint
    assert again.file_version(1) == corpus.file_version(1)
    assert verify_corpus(corpus.path).problems == []


def test_size_and_time_of_each_file_are_known_and_windows_share_them(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "in" / "long.flac", chirp(100, 3000, 3.0))
    prepare_corpus([tmp_path / "in"], tmp_path / "out", PrepareConfig(window_seconds=1.0))
    corpus = Corpus.open(tmp_path / "out")
    assert [corpus.file_version(index) for index in range(3)] == [FileVersion.of(path.stat())] * 3
    assert (tmp_path / "out" / "versions.npy").stat().st_size == 128 + 12 * 3


def test_trusted_durations_and_earlier_corpora_are_not_checked(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", SPEECH)
    manifest = write_jsonl(tmp_path / "speech.json", [{"audio_filepath": "a.wav", "duration": 1.0}])
    prepare_corpus([manifest], tmp_path / "trusted", PrepareConfig(probe="missing"))
    prepare_corpus([manifest], tmp_path / "earlier")
    (tmp_path / "earlier" / "versions.npy").unlink()
    of_the_same_size(path)
    for name in ("trusted", "earlier"):
        corpus = Corpus.open(tmp_path / name)
        assert corpus.file_version(0) is None
        corpus.load(0)
        assert verify_corpus(corpus.path).problems == []
