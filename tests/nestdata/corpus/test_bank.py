import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata import AudioError, Corpus, CorpusError, PrepareConfig, prepare_corpus
from tests.synthesis import Samples, chirp, folder_corpus, hiss, read_audio, tone, write_audio

WITH_BANK = PrepareConfig(pcm=True)


def both(directory: Path, audio: dict[str, Samples | tuple[Samples, int]]) -> tuple[Corpus, Corpus]:
    """Returns the same corpus with and without a bank."""
    banked = folder_corpus(directory, audio, WITH_BANK)
    prepare_corpus([directory], directory.with_suffix(".plain"))
    return banked, Corpus.open(directory.with_suffix(".plain"))


def test_16_bit_audio_is_restored_bit_for_bit(tmp_path: Path) -> None:
    quiet = chirp(100, 3000, 1.5, level=0.001)
    full_scale = np.resize(np.array([-1.0, 32767 / 32768, 0.0, -1 / 32768], np.float32), 8000)
    banked, plain = both(tmp_path / "speech", {"a.wav": quiet, "b.flac": hiss(24000, 1), "c.wav": full_scale})
    for index in range(3):
        (cut_id, samples), (expected_id, expected) = banked.load(index), plain.load(index)
        assert cut_id == expected_id
        assert samples.dtype == np.float32
        np.testing.assert_array_equal(samples, expected)


def test_audio_is_read_from_the_bank_alone(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": hiss(24000, 1)}, WITH_BANK)
    expected = read_audio(tmp_path / "speech" / "a.wav")
    (tmp_path / "speech" / "a.wav").unlink()
    np.testing.assert_array_equal(corpus.load(0)[1], expected)
    assert (corpus.path / "bank.pcm").stat().st_size == 2 * 24000


def test_other_audio_is_restored_within_half_a_quantization_step(tmp_path: Path) -> None:
    write_audio(tmp_path / "speech" / "float.wav", hiss(24000, 1), subtype="FLOAT")
    write_audio(tmp_path / "speech" / "24-bit.flac", hiss(16000, 2), subtype="PCM_24")
    banked, plain = both(tmp_path / "speech", {"resampled.wav": (hiss(44100, 3), 44100), "lossy.ogg": hiss(30000, 4)})
    for index in range(4):
        samples, expected = banked.load(index)[1], plain.load(index)[1]
        assert 0 < np.abs(samples - expected).max() <= 0.5 / 32768


@pytest.mark.parametrize("peak", [32767.4 / 32768, 1.0, 2.0, -1.00001, -40.0, 1e30])
def test_audio_beyond_full_scale_is_not_clipped(tmp_path: Path, peak: float) -> None:
    samples = tone(440, 1.0, level=0.5)
    samples[1000] = peak
    write_audio(tmp_path / "speech" / "a.wav", samples, subtype="FLOAT")
    prepare_corpus([tmp_path / "speech"], tmp_path / "speech.corpus", WITH_BANK)
    found = Corpus.open(tmp_path / "speech.corpus").load(0)[1]
    # One bit less precision if the peak is just above a power of two.
    step = 2 * max(1.0, 2.0 ** np.ceil(np.log2(abs(peak)))) / 32768
    assert np.abs(found - samples).max() <= step / 2


@pytest.fixture(scope="module")
def banked(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    directory = tmp_path_factory.mktemp("banked")
    return folder_corpus(directory / "speech", {f"{n}.wav": hiss(n, n) for n in (5000, 7000, 9000)}, WITH_BANK)


@given(index=st.integers(0, 2), start=st.integers(0, 4000), num_samples=st.integers(1, 1000))
def test_crop_is_a_slice(banked: Corpus, index: int, start: int, num_samples: int) -> None:
    crop = banked.load(index, start=start, num_samples=num_samples)[1]
    np.testing.assert_array_equal(crop, banked.load(index)[1][start : start + num_samples])
    out = np.full(num_samples, np.nan, np.float32)
    assert banked.load(index, start=start, num_samples=num_samples, out=out)[1] is out
    np.testing.assert_array_equal(out, crop)
    np.testing.assert_array_equal(banked.load(index, start=start)[1], banked.load(index)[1][start:])


def test_cut_that_could_not_be_decoded_is_an_error_and_the_others_are_intact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for n in (6000, 12000, 18000):
        write_audio(tmp_path / "speech" / f"{n}.flac", hiss(n, n))
    middle = tmp_path / "speech" / "12000.flac"
    middle.write_bytes(middle.read_bytes()[:5000])
    with caplog.at_level(logging.WARNING):
        prepare_corpus([tmp_path / "speech"], tmp_path / "speech.corpus", WITH_BANK)
    assert "speech.corpus: 1 of 3 cuts could not be decoded" in caplog.text
    corpus = Corpus.open(tmp_path / "speech.corpus")
    for index, n in ((0, 6000), (2, 18000)):
        np.testing.assert_array_equal(corpus.load(index)[1], read_audio(tmp_path / "speech" / f"{n}.flac"))
    with pytest.raises(AudioError, match=r"cut '12000' could not be decoded when the bank was written") as caught:
        corpus.load(1, start=5, num_samples=10)
    assert caught.value.reason == "unreadable"


@pytest.mark.parametrize(("name", "rest"), [("bank.pcm", 0), ("bank.pcm", -2), ("bank.npy", -9)])
def test_damaged_bank_is_an_error(tmp_path: Path, name: str, rest: int) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": hiss(9000, 1), "b.wav": hiss(4000, 2)}, WITH_BANK)
    path = corpus.path / name
    path.write_bytes(path.read_bytes()[:rest])
    with pytest.raises(CorpusError, match=r"speech\.corpus: the corpus is damaged .*\. Prepare it again"):
        Corpus.open(corpus.path)
