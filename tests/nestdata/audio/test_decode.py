import copy
import gc
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lhotse import MonoCut, Recording
from lhotse.utils import compute_num_samples

from nestdata import AudioError, Corpus, PrepareConfig, prepare_corpus
from nestdata.audio.decode import energy, load_samples, samples_in
from tests.synthesis import Samples, chirp, folder_corpus, hiss, read_audio, write_audio, write_jsonl


@pytest.fixture
def speech() -> Samples:
    return chirp(100, 3000, 1.5) + hiss(24000, 1)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def span_cut(directory: Path, path: Path, offset: float, duration: float, rate: int = 16000) -> MonoCut:
    """Returns a cut of a span of a file, prepared from a manifest."""
    manifest = write_jsonl(
        directory / "span.json", [{"audio_filepath": str(path), "offset": offset, "duration": duration}]
    )
    prepare_corpus([manifest], directory / "span.corpus", PrepareConfig(sampling_rate=rate), overwrite=True)
    return Corpus.open(directory / "span.corpus")[0]


@pytest.mark.parametrize(("start", "number"), [(0, 1), (0, 16000), (123, 4567), (15999, 1), (8000, 8000)])
def test_span_of_a_cut_is_its_slice_bit_for_bit(tmp_path: Path, speech: Samples, start: int, number: int) -> None:
    cut = span_cut(tmp_path, write_audio(tmp_path / "a.flac", speech), 0.25, 1.0)
    part = load_samples(cut, start=start, num_samples=number)
    np.testing.assert_array_equal(part, load_samples(cut)[start : start + number])


@pytest.mark.parametrize("rate", [8000, 44100])
def test_span_of_a_resampled_cut_is_aligned_with_the_cut(tmp_path: Path, rate: int) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": (chirp(100, 2000, 1.5, rate), rate)})
    part = load_samples(corpus[0], start=8000, num_samples=4000)
    np.testing.assert_allclose(part[100:-100], load_samples(corpus[0])[8100:11900], atol=2e-3)


@pytest.mark.parametrize("rate", [8000, 44100])
@pytest.mark.usefixtures("torch_threads")
def test_resampling_gives_the_same_bits_on_any_number_of_threads(tmp_path: Path, rate: int) -> None:
    lengths = [5003, 7001, 8000, 30011]
    corpus = folder_corpus(tmp_path / "speech", {f"{n}.wav": (hiss(n, n), rate) for n in lengths})
    torch.set_num_threads(1)
    expected = [load_samples(corpus[index]) for index in range(4)]
    for num_threads in (2, 3, 4, 16):
        torch.set_num_threads(num_threads)
        for index in range(4):
            np.testing.assert_array_equal(load_samples(corpus[index]), expected[index])
        assert torch.get_num_threads() == num_threads


def test_file_that_ends_before_the_cut_starts_is_an_error(tmp_path: Path, speech: Samples) -> None:
    path = write_audio(tmp_path / "a.wav", speech)
    cut = span_cut(tmp_path, path, 1.0, 0.5)
    write_audio(path, speech[:8000])
    with pytest.raises(AudioError, match=r"cut '.*a@1\.000\+0\.500': "):
        load_samples(cut)


def test_file_that_lacks_at_most_a_hundredth_of_a_second_is_completed_with_zeros(
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


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_audio_that_is_not_finite_is_an_error_that_names_the_cut(tmp_path: Path, speech: Samples, value: float) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": speech})
    broken = speech.copy()
    broken[12345] = value
    write_audio(tmp_path / "speech" / "a.wav", broken, subtype="FLOAT")
    assert not np.isfinite(read_audio(tmp_path / "speech" / "a.wav")).all()
    with pytest.raises(AudioError, match=r"cut 'a': .*a\.wav holds NaN or Inf") as caught:
        load_samples(corpus[0])
    assert caught.value.reason == "not_finite"
    load_samples(corpus[0], num_samples=12345)


def half(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


@pytest.mark.parametrize(
    ("name", "damage", "reason", "message"),
    [
        ("a.wav", None, "missing", r"cannot read .*a\.wav: FileNotFoundError"),
        ("a.wav", lambda whole: whole[:0], "empty", r"cannot read .*a\.wav"),
        ("a.flac", lambda whole: whole[:30], "unreadable", r"cannot read .*a\.flac"),
        ("a.flac", half, "truncated", r"cannot read .*a\.flac: .*lost sync"),
        ("a.mp3", half, "truncated", r"a\.mp3 ends 0\.8.. s before the cut does"),
    ],
)
def test_damaged_file_is_an_error_that_names_the_cut_and_has_a_reason(
    tmp_path: Path, speech: Samples, name: str, damage: Callable[[bytes], bytes] | None, reason: str, message: str
) -> None:
    corpus = folder_corpus(tmp_path / "speech", {name: speech})
    path = tmp_path / "speech" / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(AudioError, match=f"cut 'a': .*{message}") as caught:
        load_samples(corpus[0])
    assert caught.value.reason == reason


def test_no_file_stays_open_when_audio_cannot_be_read(tmp_path: Path, speech: Samples) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.flac": speech})
    path = tmp_path / "speech" / "a.flac"
    whole = path.read_bytes()
    gc.collect()  # closes what earlier tests have left to it
    before = len(os.listdir("/proc/self/fd"))
    for content in (whole, whole[:5000], whole[:30], b"", b"not audio"):
        path.write_bytes(content)
        for _ in range(3):
            if content == whole:
                load_samples(corpus[0])
            else:
                with pytest.raises(AudioError):
                    load_samples(corpus[0])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("rate", "suffix"), [(4000, "wav"), (8000, "ogg"), (11025, "flac"), (44100, "wav")])
def test_spans_of_a_file_of_another_rate_equal_those_of_lhotse(tmp_path: Path, rate: int, suffix: str) -> None:
    path = write_audio(tmp_path / f"a.{suffix}", hiss(2 * rate - 7, 1), rate)
    # Odd ends, positions between two samples of the file, rounded manifests, and almost the whole file.
    spans = [(80 / 16000, 4001 / 16000), (240 / 16000, 0.5), (0.333, 1.25), (0.0004, 1.997)]
    for start, duration in spans:
        cut = span_cut(tmp_path, path, start, duration)
        expected = cut.load_audio()[0]
        assert cut.num_samples == len(expected)
        np.testing.assert_allclose(load_samples(cut), expected, rtol=0, atol=1e-6)


def test_chain_of_resamplings_equals_that_of_lhotse(tmp_path: Path, speech: Samples) -> None:
    recording = Recording.from_file(write_audio(tmp_path / "a.wav", speech, 44100)).resample(8000).resample(16000)
    cut = MonoCut("a", 0.1, 0.4, 0, recording=recording)
    np.testing.assert_allclose(load_samples(cut), cut.load_audio()[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", [lambda r: r.perturb_speed(1.1), lambda r: r.perturb_volume(0.5).resample(8000)])
def test_other_transforms_equal_those_of_lhotse(
    tmp_path: Path, speech: Samples, change: Callable[[Recording], Recording]
) -> None:
    recording = change(Recording.from_file(write_audio(tmp_path / "a.wav", speech)))
    cut = MonoCut("a", 0.25, 0.75, 0, recording=recording)
    fields = cut.to_dict()
    before = copy.deepcopy(fields)
    np.testing.assert_allclose(load_samples(fields), cut.load_audio()[0], rtol=0, atol=1e-6)
    assert fields == before


@given(num_samples=st.integers(0, 10**9), rate=st.sampled_from([8000, 11025, 16000, 22050, 44100, 48000]))
def test_durations_are_rounded_to_samples_as_in_lhotse(num_samples: int, rate: int) -> None:
    for duration in (num_samples / rate, (num_samples + 0.5) / rate, round(num_samples / rate, 3)):
        assert samples_in(duration, rate) == compute_num_samples(duration, rate)


def test_energy_is_the_sum_of_squares() -> None:
    assert energy(np.array([3.0, -4.0], np.float32)) == 25.0
    samples = hiss(100_001, 1)
    assert energy(samples) == pytest.approx(math.fsum(float(x) ** 2 for x in samples), rel=1e-12)
