"""Levels of samples, and the files that the report plays."""

import math
from pathlib import Path

import numpy as np
import pytest
import soundfile

from nestdata import AudioError
from nestdata.prepare.reporting.sound import MAX_SECONDS, Sound, measure, read_sound, write_sound
from nestdata.prepare.writing.found import AudioSpan, Extent
from tests.synthesis import chirp, read_audio, tone, write_audio


def test_levels_are_those_of_a_sine_of_a_square_wave_and_of_silence() -> None:
    sine = measure(tone(440, 1.0, level=0.5))
    assert sine.rms_db == pytest.approx(20 * math.log10(0.5 / math.sqrt(2)), abs=1e-3)  # whole periods
    assert sine.peak_db == pytest.approx(20 * math.log10(0.5), abs=0.02)  # no sample need be at the peak
    assert measure(np.array([1, -1, 1, -1], np.float32)) == (0.0, 0.0, 1.0)
    assert measure(np.zeros(9, np.float32)) == (-math.inf, -math.inf, 0.0)
    assert measure(np.array([math.nan, 1, -math.inf, 1], np.float32)).rms_db == pytest.approx(10 * math.log10(0.5))


@pytest.mark.parametrize(
    ("samples", "share"),
    [
        ([0, 1, 1, 1, 0, 0, 0, 0, 0, 0], 0.3),
        ([0, 1, 1, 0, 1, 1, 0, 1, 0, 0], 0.0),  # peaks that just fit
        ([-1, -1, -1, -1, -1, 0, 0, 0, 0.9999, 0.9999], 0.5),
        ([1, 1], 0.0),
    ],
)
def test_clipped_samples_are_at_full_scale_three_times_in_a_row(samples: list[float], share: float) -> None:
    assert measure(np.array(samples, np.float32)).clipped == pytest.approx(share)


def test_a_span_of_one_channel_is_read_at_the_rate_of_its_file(tmp_path: Path) -> None:
    left, right = chirp(100, 900, 2.0, 8000), chirp(300, 2000, 2.0, 8000)
    path = write_audio(tmp_path / "a.wav", np.stack([left, right], axis=1), 8000)
    stored = soundfile.read(path, dtype="float32")[0]
    sound = read_sound(AudioSpan(str(path), None, 0.5, 1.0, 1))
    assert sound.rate == 8000
    assert np.array_equal(sound.samples, stored[4000:12000, 1])
    mixed = read_sound(AudioSpan(str(path), None, 0.5, None, None))
    assert np.array_equal(mixed.samples, stored[4000:].mean(axis=1))


def test_a_member_of_a_shard_is_read_and_long_audio_is_cut(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.flac", tone(300, MAX_SECONDS + 3.0, 4000), 4000)
    content = path.read_bytes()
    (tmp_path / "shard").write_bytes(b"x" * 700 + content + b"y" * 9)
    extent = Extent(700, len(content), 709 + len(content), None)
    sound = read_sound(AudioSpan(str(tmp_path / "shard"), extent, 0.0, 13.0, 0))
    assert np.array_equal(sound.samples, read_audio(path)[: int(MAX_SECONDS) * 4000])


def test_audio_that_cannot_be_decoded_is_an_error_that_does_not_name_the_file(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", tone(300, 1.0))
    (tmp_path / "text.wav").write_text("not audio")
    for name, channel, start, message in (
        ("gone.wav", 0, 0.0, "no such file"),
        ("text.wav", 0, 0.0, "Format not recognised"),
        (".", 0, 0.0, "it is a directory"),
        (path.name, 2, 0.0, "no channel 2"),
        (path.name, 0, 5.0, "no samples"),
    ):
        with pytest.raises(AudioError, match=message) as caught:
            read_sound(AudioSpan(str(tmp_path / name), None, start, None, channel))
        assert str(tmp_path) not in str(caught.value)


def test_a_written_file_has_the_samples_of_16_bits_and_clips_the_rest(tmp_path: Path) -> None:
    samples = np.array([0.5, -0.25, 1.5, -2.0, math.nan, 3 / 32768], np.float32)
    num_bytes = write_sound(tmp_path / "a.flac", Sound(samples, 16000))
    assert num_bytes == (tmp_path / "a.flac").stat().st_size
    assert soundfile.read(tmp_path / "a.flac", dtype="int16")[0].tolist() == [16384, -8192, 32767, -32768, 0, 3]
