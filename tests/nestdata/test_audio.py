from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lhotse import MonoCut

from nestdata import AudioError, Corpus, PrepareConfig, prepare
from nestdata.audio import load_samples
from tests.synthesis import Samples, chirp, folder_corpus, hiss, read_audio, tone, write_audio, write_jsonl


@pytest.fixture
def speech() -> Samples:
    return chirp(100, 3000, 1.5) + hiss(24000, 1)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def span_cut(directory: Path, path: Path, offset: float, duration: float, rate: int = 16000) -> MonoCut:
    """A cut of a span of a file, as a manifest asks for it."""
    manifest = write_jsonl(
        directory / "span.json", [{"audio_filepath": str(path), "offset": offset, "duration": duration}]
    )
    prepare([manifest], directory / "span.corpus", PrepareConfig(sampling_rate=rate), overwrite=True)
    return Corpus.open(directory / "span.corpus")[0]


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg"])
def test_a_cut_of_a_whole_file_is_the_file_bit_for_bit(tmp_path: Path, speech: Samples, name: str) -> None:
    corpus = folder_corpus(tmp_path / "speech", {name: speech})
    samples = load_samples(corpus[0])
    assert samples.dtype == np.float32
    np.testing.assert_array_equal(samples, read_audio(tmp_path / "speech" / name))


@pytest.mark.parametrize("name", ["a.wav", "a.flac"])
@pytest.mark.parametrize(("first", "number"), [(0, 4800), (1, 9999), (7777, 4001), (12000, 12000), (22399, 1601)])
def test_a_cut_that_starts_inside_a_file_is_its_slice_bit_for_bit(
    tmp_path: Path, speech: Samples, name: str, first: int, number: int
) -> None:
    path = write_audio(tmp_path / name, speech)
    cut = span_cut(tmp_path, path, first / 16000, number / 16000)
    samples = load_samples(cut)
    assert len(samples) == number == cut.num_samples
    np.testing.assert_array_equal(samples, read_audio(path)[first : first + number])


@pytest.mark.parametrize(("start", "number"), [(0, 1), (0, 16000), (123, 4567), (15999, 1), (8000, 8000)])
def test_a_part_of_a_cut_is_its_slice_bit_for_bit(tmp_path: Path, speech: Samples, start: int, number: int) -> None:
    cut = span_cut(tmp_path, write_audio(tmp_path / "a.flac", speech), 0.25, 1.0)
    part = load_samples(cut, start=start, num_samples=number)
    np.testing.assert_array_equal(part, load_samples(cut)[start : start + number])


def test_a_part_without_a_length_goes_to_the_end_of_the_cut(tmp_path: Path, speech: Samples) -> None:
    cut = span_cut(tmp_path, write_audio(tmp_path / "a.flac", speech), 0.25, 1.0)
    np.testing.assert_array_equal(load_samples(cut, start=15000), load_samples(cut)[15000:])


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_a_file_of_another_rate_is_resampled_to_the_same_tone(tmp_path: Path, rate: int) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": (tone(440, 1.2, rate), rate)})
    samples = load_samples(corpus[0])
    assert len(samples) == 19200
    # Away from the ends, where a filter sees nothing beyond.
    np.testing.assert_allclose(samples[400:-400], tone(440, 1.2)[400:-400], atol=2e-3)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_a_part_of_a_resampled_cut_is_in_its_place(tmp_path: Path, rate: int) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": (chirp(100, 2000, 1.5, rate), rate)})
    part = load_samples(corpus[0], start=8000, num_samples=4000)
    np.testing.assert_allclose(part[100:-100], load_samples(corpus[0])[8100:11900], atol=2e-3)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
@pytest.mark.usefixtures("torch_threads")
def test_resampling_gives_the_same_bits_on_any_number_of_threads(tmp_path: Path, rate: int) -> None:
    lengths = [5003, 7001, 8000, 30011]
    corpus = folder_corpus(tmp_path / "speech", {f"{n}.wav": (hiss(n, n), rate) for n in lengths})
    torch.set_num_threads(1)
    expected = [load_samples(corpus[row]) for row in range(4)]
    for num_threads in (2, 3, 4, 16):
        torch.set_num_threads(num_threads)
        for row in range(4):
            np.testing.assert_array_equal(load_samples(corpus[row]), expected[row])
        assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("channel", [0, 1, 2])
def test_the_channel_of_the_cut_is_read(tmp_path: Path, channel: int) -> None:
    channels = np.stack([hiss(16000, seed) for seed in range(3)], axis=1)
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": channels}, PrepareConfig(channel=channel))
    np.testing.assert_array_equal(load_samples(corpus[0]), read_audio(tmp_path / "speech" / "a.wav")[:, channel])


def test_a_file_that_became_shorter_is_an_error_that_names_the_cut(tmp_path: Path, speech: Samples) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": speech})
    write_audio(tmp_path / "speech" / "a.wav", speech[:20000])
    with pytest.raises(AudioError, match=r"cut 'a': .*a\.wav ends 0\.250 s before the cut does"):
        load_samples(corpus[0])


def test_a_truncated_flac_is_an_error_that_names_the_cut(tmp_path: Path, speech: Samples) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.flac": speech})
    path = tmp_path / "speech" / "a.flac"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(AudioError, match=r"cut 'a': .*a\.flac"):
        load_samples(corpus[0])


def test_a_file_that_ends_before_the_cut_starts_is_an_error(tmp_path: Path, speech: Samples) -> None:
    path = write_audio(tmp_path / "a.wav", speech)
    cut = span_cut(tmp_path, path, 1.0, 0.5)
    write_audio(path, speech[:8000])
    with pytest.raises(AudioError, match=r"cut '.*a@1\.000\+0\.500': "):
        load_samples(cut)


def test_a_file_that_lacks_less_than_a_hundredth_of_a_second_is_completed_with_zeros(
    tmp_path: Path, speech: Samples
) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": speech})
    write_audio(tmp_path / "speech" / "a.wav", speech[:-160])
    samples = load_samples(corpus[0])
    assert len(samples) == 24000
    assert not samples[-160:].any()
    assert samples[-200:-160].any()
    write_audio(tmp_path / "speech" / "a.wav", speech[:-161])
    with pytest.raises(AudioError, match="before the cut does"):
        load_samples(corpus[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_audio_that_is_not_finite_is_an_error_that_names_the_cut(tmp_path: Path, speech: Samples, value: float) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": speech})
    broken = speech.copy()
    broken[12345] = value
    write_audio(tmp_path / "speech" / "a.wav", broken, subtype="FLOAT")
    assert not np.isfinite(read_audio(tmp_path / "speech" / "a.wav")).all()
    with pytest.raises(AudioError, match=r"cut 'a': .*a\.wav holds NaN or Inf"):
        load_samples(corpus[0])


def test_a_file_that_is_gone_is_an_error_that_names_the_cut(tmp_path: Path, speech: Samples) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": speech})
    (tmp_path / "speech" / "a.wav").unlink()
    with pytest.raises(AudioError, match=r"cut 'a': cannot read .*a\.wav: "):
        load_samples(corpus[0])


def test_a_file_that_is_no_audio_any_more_is_an_error_that_names_the_cut(tmp_path: Path, speech: Samples) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": speech})
    (tmp_path / "speech" / "a.wav").write_bytes(b"not audio" * 1000)
    with pytest.raises(AudioError, match=r"cut 'a': cannot read .*a\.wav: "):
        load_samples(corpus[0])


def test_a_channel_that_the_file_has_lost_is_an_error_that_names_the_cut(tmp_path: Path) -> None:
    stereo = np.stack([hiss(16000, 1), hiss(16000, 2)], axis=1)
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": stereo}, PrepareConfig(channel=1))
    write_audio(tmp_path / "speech" / "a.wav", stereo[:, 0])
    with pytest.raises(AudioError, match="cut 'a': "):
        load_samples(corpus[0])
