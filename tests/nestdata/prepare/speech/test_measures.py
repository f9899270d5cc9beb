import numpy as np
import pytest

from nestdata.prepare.speech.measures import FramePowers, SpeechTotals

SPEECH = np.array([[20, 60], [100, 140]])


def powers(speech: float, noise: float) -> FramePowers:
    values = np.full(200, noise, np.float32)
    for start, stop in SPEECH:
        values[start:stop] = speech
    return FramePowers(values, SPEECH)


def test_share_level_and_ratio_of_known_powers() -> None:
    found = powers(speech=0.0101, noise=0.0001).measure(0, 200)
    assert found == (0.4, -20.0, 20.0)
    assert found.fields() == {"nest_speech_share": 0.4, "nest_speech_dbfs": -20.0, "nest_snr_db": 20.0}


def test_a_span_without_pauses_takes_the_noise_of_the_recording() -> None:
    assert powers(speech=0.0101, noise=0.0001).measure(20, 60) == (1.0, -20.0, 20.0)


def test_noise_in_the_pauses_of_the_span_counts_before_that_of_the_recording() -> None:
    values = np.full(200, 1e-4, np.float32)
    values[70:90] = 1e-2  # louder around one span
    values[20:60] = values[100:140] = 0.02
    found = FramePowers(values, SPEECH)
    assert found.measure(20, 100).snr_db == 0.0
    assert found.measure(100, 200).snr_db == pytest.approx(23.0)


def test_frames_beside_speech_are_no_noise() -> None:
    values = np.full(200, 1e-4, np.float32)
    for start, stop in SPEECH:
        values[start - 2 : stop + 2] = 0.0101
    assert FramePowers(values, SPEECH).measure(0, 200).snr_db == 20.0


def test_digital_silence_counts_as_noise_of_16_bits() -> None:
    assert powers(speech=0.01, noise=0.0).measure(0, 200).snr_db == 78.0


def test_noise_that_is_louder_than_speech_gives_the_lowest_ratio() -> None:
    assert powers(speech=0.01, noise=0.02).measure(0, 200).snr_db == -20.0


def test_what_cannot_be_measured_is_left_out() -> None:
    runs = np.array([[5, 95]])
    found = FramePowers(np.full(100, 0.01, np.float32), runs)
    assert found.measure(0, 100).fields() == {"nest_speech_share": 0.9, "nest_speech_dbfs": -20.0}
    assert found.measure(0, 5).fields() == {"nest_speech_share": 0.0}


def test_totals_add_up() -> None:
    a = SpeechTotals(num_recordings=1, frames=10, speech_frames=5, cut_frames=7, num_in_speech=1)
    b = SpeechTotals(num_recordings=1, num_without_speech=1, frames=3)
    assert SpeechTotals.sum([a, b]) == SpeechTotals(
        num_recordings=2, num_without_speech=1, frames=13, speech_frames=5, cut_frames=7, num_in_speech=1
    )
    assert SpeechTotals.sum([]) == SpeechTotals()
