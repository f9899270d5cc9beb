import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import torchaudio

from nestdata import prepare_corpus
from nestdata.audio import resampling
from nestdata.audio.resampling import one_torch_thread, resample
from tests.synthesis import Samples, folder_corpus, hiss, tone, write_audio

AUDIO_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 37800, 44100, 48000, 88200, 96000, 176400, 192000)


def by_torchaudio(samples: Samples, source_rate: int, rate: int) -> Samples:
    with one_torch_thread():
        resampled: Samples = torchaudio.transforms.Resample(source_rate, rate)(torch.tensor(samples)).numpy()
    return resampled


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_common_rates_have_the_bits_of_torchaudio(rate: int) -> None:
    for source_rate in (*AUDIO_RATES, 64000):
        samples = hiss(source_rate // 10 + 3, source_rate)
        np.testing.assert_array_equal(resample(samples, source_rate, rate), by_torchaudio(samples, source_rate, rate))


@pytest.mark.parametrize(("source_rate", "rate"), [(16000, 8000), (11025, 16000), (3, 7), (96000, 11025)])
@pytest.mark.parametrize("num_samples", [1, 17, 5003])
def test_interpolation_without_a_kernel_equals_torchaudio_in_double_precision(
    monkeypatch: pytest.MonkeyPatch, source_rate: int, rate: int, num_samples: int
) -> None:
    samples = hiss(num_samples, 1, level=0.3)
    # In single precision, torchaudio rounds the positions of the samples.
    expected = torchaudio.functional.resample(torch.tensor(samples, dtype=torch.float64), source_rate, rate).numpy()
    monkeypatch.setattr(resampling, "_MAX_KERNEL", 0)
    for block in (1 << 16, 100):
        monkeypatch.setattr(resampling, "_BLOCK", block)
        resampled = resample(samples, source_rate, rate)
        assert resampled.dtype == np.float32
        np.testing.assert_allclose(resampled, expected, rtol=0, atol=2**-24)


@pytest.mark.parametrize("rate", [15999, 4001])
def test_odd_rates_are_resampled_to_the_same_tone(tmp_path: Path, rate: int) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": (tone(440, 1.0, rate), rate)})
    samples = corpus.load(0)[1]
    assert len(samples) == 16000
    np.testing.assert_allclose(samples[100:-100], tone(440, 1.0)[100:-100], atol=2e-3)


@pytest.mark.parametrize(("source_rate", "num_seconds"), [(15999, 4), (11127, 4), (2**31 - 1, 1e-4)])
def test_resampling_takes_memory_for_the_audio_and_not_for_the_rates(source_rate: int, num_seconds: float) -> None:
    samples = hiss(round(source_rate * num_seconds), 1)
    resample(samples[:100], source_rate, 16000)
    tracemalloc.start()
    resampled = resample(samples, source_rate, 16000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The samples with silence around them, the result, and blocks of at most a few weights for each sample of a filter.
    taps = 2 * 6 * source_rate / 16000
    assert peak < 2 * samples.nbytes + resampled.nbytes + 100 * max(resampling._BLOCK, taps)


def test_a_file_of_a_tiny_rate_does_not_become_hours_of_audio(tmp_path: Path) -> None:
    write_audio(tmp_path / "audio" / "a.wav", hiss(32000, 1), 1)
    write_audio(tmp_path / "audio" / "b.wav", hiss(4000, 1), 4000)
    report = prepare_corpus([tmp_path / "audio"], tmp_path / "out")
    assert (report.num_cuts, report.rejected) == (1, {"rate_too_low": 1})
