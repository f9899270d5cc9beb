import json
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import soundfile

from nestdata import AudioError, ConfigError, Corpus, PrepareConfig, load_audio, prepare_corpus


def tones(num_samples: int, rate: int) -> Any:
    time = np.arange(num_samples) / rate
    return (0.3 * np.sin(2 * np.pi * 300 * time) + 0.1 * np.sin(2 * np.pi * 1700 * time)).astype(np.float32)


@pytest.mark.parametrize(("rate", "num_samples"), [(8000, 8007), (16000, 4001), (44100, 44107), (15999, 501)])
def test_a_file_and_an_array_give_the_samples_of_a_corpus(rate: int, num_samples: int, tmp_path: Path) -> None:
    samples = tones(num_samples, rate)
    soundfile.write(tmp_path / "a.wav", samples, rate, subtype="FLOAT")
    (tmp_path / "a.json").write_text(json.dumps({"audio_filepath": "a.wav"}) + "\n")
    prepare_corpus([tmp_path / "a.json"], tmp_path / "a.corpus", PrepareConfig(min_seconds=0.0, report_samples=0))
    _, expected = Corpus.open(tmp_path / "a.corpus").load(0)
    np.testing.assert_array_equal(load_audio(tmp_path / "a.wav"), expected)
    np.testing.assert_array_equal(load_audio(samples, source_rate=rate), expected)
    np.testing.assert_array_equal(load_audio(samples.astype(np.float64), source_rate=rate), expected)


def test_integers_are_amplitudes_and_the_first_channel_is_read(tmp_path: Path) -> None:
    integers = (tones(1000, 16000) * 30000).astype(np.int16)
    np.testing.assert_array_equal(load_audio(integers, source_rate=16000), integers.astype(np.float32) / 32768)
    soundfile.write(tmp_path / "two.wav", np.stack([integers, -integers], 1), 16000)
    np.testing.assert_array_equal(load_audio(str(tmp_path / "two.wav")), integers.astype(np.float32) / 32768)


@pytest.mark.parametrize(
    ("audio", "rate", "message"),
    [
        (np.zeros((2, 5), np.float32), 8000, r"shape \(2, 5\): expected \(num_samples,\)"),
        (np.zeros(5, np.int64), 8000, "audio is int64: expected the path of an audio file, or an array of float32"),
        (np.zeros(5, np.float32), None, "the sampling rate of the array is None: give it in Hz"),
        (np.zeros(5, np.float32), 399, "399 Hz: the minimum is 4000 Hz"),
        ("a.wav", 8000, "the rate of a file is in its header"),
    ],
)
def test_wrong_arguments_say_what_is_expected(
    audio: Any, rate: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Users do not have the checks of annotations, which would come first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ConfigError, match=message):
        load_audio(audio, source_rate=rate)


def test_unusable_audio_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("text")
    with pytest.raises(AudioError, match=r"gone\.wav does not exist\. Give an audio file"):
        load_audio(tmp_path / "gone.wav")
    with pytest.raises(AudioError, match=r"text\.wav"):
        load_audio(tmp_path / "text.wav")
    with pytest.raises(AudioError, match="sample 1 of the array is nan"):
        load_audio(np.array([0.0, np.nan]), source_rate=8000)
