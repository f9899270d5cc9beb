from pathlib import Path

import numpy as np
import pytest

from nestdata import NoiseConfig, NoiseSampler, NoiseSpan
from nestdata.stateless_rng import StatelessRng
from tests.synthesis import Samples, folder_corpus, hiss, read_audio

SILENCE = np.zeros(16000, np.float32)


def draw_many(sampler: NoiseSampler, num_samples: int, number: int = 40) -> list[NoiseSpan]:
    return [sampler.draw(num_samples, StatelessRng(0, "noise", key)) for key in range(number)]


def level_db(samples: Samples) -> float:
    return float(10 * np.log10(np.square(samples, dtype=np.float64).mean()))


def positions_of(part: Samples, whole: Samples) -> list[int]:
    """Returns every position at which a signal holds a part, bit for bit."""
    peak = int(np.abs(part).argmax())
    starts = np.flatnonzero(whole == part[peak]) - peak
    return [int(start) for start in starts if start >= 0 and np.array_equal(whole[start : start + len(part)], part)]


def test_shorter_noise_is_returned_whole(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "noise", {"a.wav": hiss(5000, 1)})
    span = NoiseSampler(corpus).draw(16000, StatelessRng(0, "noise"))
    np.testing.assert_array_equal(span.samples, read_audio(tmp_path / "noise" / "a.wav"))


def test_first_and_last_position_of_a_noise_are_both_drawn(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "noise", {"a.wav": hiss(4002, 1)})
    whole = read_audio(tmp_path / "noise" / "a.wav")
    spans = draw_many(NoiseSampler(corpus), 4000)
    assert {span.samples[0] for span in spans} == set(whole[:3])


def test_white_noise_is_used_after_max_reads_failures(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "noise", {f"{i}.wav": hiss(8000, i) for i in range(3)})
    for path in (tmp_path / "noise").iterdir():
        path.unlink()
    for span in draw_many(NoiseSampler(corpus, NoiseConfig(max_reads=3)), 4000, number=5):
        assert (span.kind, span.cut_id) == ("white", "")
        assert (len(span.bad), span.num_silent_crops) == (3, 0)
        assert len(span.samples) == 4000


def test_noise_that_cannot_be_read_is_replaced_by_another(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "noise", {f"{i}.wav": hiss(4000, i) for i in range(4)})
    (tmp_path / "noise" / "0.wav").unlink()
    (tmp_path / "noise" / "1.wav").write_bytes(b"no audio" * 999)
    (tmp_path / "noise" / "2.wav").write_bytes((tmp_path / "noise" / "2.wav").read_bytes()[:3000])
    spans = draw_many(NoiseSampler(corpus), 4000)
    assert {(span.kind, span.cut_id) for span in spans} == {("noise", "3")}
    failed = [len(span.bad) for span in spans]
    # Number of failures before a success with probability 1/4: mean 3, standard deviation of the mean 0.55.
    assert 1 < sum(failed) / len(failed) < 5
    assert min(failed) == 0


def test_white_noise_is_between_minus_ninety_and_minus_forty_six_decibels(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "noise", {"a.wav": SILENCE})
    spans = draw_many(NoiseSampler(corpus), 16000, number=60)
    assert {span.kind for span in spans} == {"white"}
    levels = [level_db(span.samples) for span in spans]
    # Five standard deviations of a level measured over 16000 samples.
    tolerance = 5 * 10 / np.log(10) * np.sqrt(2 / 16000)
    assert -90 - tolerance < min(levels) < -84
    assert -52 < max(levels) < -46 + tolerance
    assert np.mean(levels) == pytest.approx(-68, abs=5)


def test_white_noise_has_a_flat_spectrum_and_differs_by_key(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "noise", {"a.wav": SILENCE})
    first, second = draw_many(NoiseSampler(corpus), 32000, number=2)
    assert abs(float(np.corrcoef(first.samples, second.samples)[0, 1])) < 0.03
    bands = np.square(np.abs(np.fft.rfft(first.samples)))[1:].reshape(8, -1).mean(axis=1)
    assert bands.max() / bands.min() < 1.3


def test_at_most_max_crops_crops_are_tried(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "noise", {"a.wav": np.concatenate([SILENCE, SILENCE, hiss(16000, 1)])})
    spans = draw_many(NoiseSampler(corpus, NoiseConfig(max_crops=2)), 1000)
    outcomes = {(span.kind, span.num_silent_crops) for span in spans}
    assert outcomes == {("noise", 0), ("noise", 1), ("white", 2)}


def test_silent_noise_with_one_possible_crop_is_tried_once(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "noise", {"a.wav": SILENCE})
    span = NoiseSampler(corpus).draw(16000, StatelessRng(0, "noise"))
    assert (span.kind, span.num_silent_crops, len(span.samples)) == ("white", 1, 16000)


def test_crop_of_a_partly_silent_noise_is_never_silent(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "noise", {"a.wav": np.concatenate([SILENCE, hiss(16000, 1), SILENCE])})
    whole = read_audio(tmp_path / "noise" / "a.wav")
    sampler = NoiseSampler(corpus)
    spans = draw_many(sampler, 2000)
    assert {span.kind for span in spans} == {"noise"}
    for span in spans:
        assert not sampler.is_silent(span.samples)
        assert positions_of(span.samples, whole)
    drawn_again = [span.num_silent_crops for span in spans]
    assert 0 in drawn_again
    assert max(drawn_again) > 1


def test_silence_is_defined_by_power_and_not_by_the_sum_of_samples() -> None:
    sampler = NoiseSampler()
    balanced = np.tile(np.array([0.1, -0.1], np.float32), 500)
    assert not sampler.is_silent(balanced)
    assert not sampler.is_silent(-np.abs(balanced))
    assert sampler.is_silent(np.zeros(1000, np.float32))
    quiet = np.full(1000, 10 ** (-91 / 20), np.float32)
    assert sampler.is_silent(quiet)
    assert not sampler.is_silent(quiet * np.float32(10 ** (2 / 20)))


def test_silence_threshold_is_configurable(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "noise", {"a.wav": hiss(16000, 1, level=0.01)})
    assert NoiseSampler(corpus).draw(4000, StatelessRng(0, "noise")).kind == "noise"
    config = NoiseConfig(silence_db=-30.0)
    assert NoiseSampler(corpus, config).draw(4000, StatelessRng(0, "noise")).kind == "white"


def test_noise_without_a_corpus_is_zero() -> None:
    span = NoiseSampler().draw(1234, StatelessRng(0, "noise"))
    assert span.kind == "none"
    np.testing.assert_array_equal(span.samples, np.zeros(1234, np.float32))
