"""Every audio format that inputs may name, tested from the manifest to the loaded samples."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import torchaudio

from nestdata import Corpus, PrepareConfig, prepare_corpus
from tests.nestdata.prepare.inputs.reading import decoded
from tests.synthesis import Samples, chirp, hiss, write_jsonl

# By suffix: libsndfile's names of container and codec, the rates in Hz of the codec, and its number of channels.
FORMATS = {
    "wav": ("WAV", "PCM_16", (8000, 16000, 44100, 48000), 3),
    "f32.wav": ("WAV", "FLOAT", (16000, 44100), 3),
    "flac": ("FLAC", "PCM_16", (8000, 16000, 44100, 48000), 3),
    "ogg": ("OGG", "VORBIS", (8000, 16000, 44100, 48000), 3),
    "opus": ("OGG", "OPUS", (8000, 16000, 48000), 3),
    "mp3": ("MP3", "MPEG_LAYER_III", (8000, 16000, 44100, 48000), 2),
}
CHANNELS = sorted({(rate, i) for _, _, rates, most in FORMATS.values() for rate in rates for i in range(most)})
SECONDS = 1.3
Audio = Callable[[int], dict[str, Path]]


def speech(rate: int, num_channels: int) -> Samples:
    """Returns sweeps with noise, shape (samples, channels); each channel has its own range of frequencies."""
    tracks = [chirp(150 * (i + 1), 1500 * (i + 1), SECONDS, rate) for i in range(num_channels)]
    return np.stack([track + hiss(len(track), i, level=0.02) for i, track in enumerate(tracks)], axis=1)


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Audio:
    """Returns a function that writes audio of one rate, in all formats and numbers of channels; returns paths by id."""

    @lru_cache
    def write(rate: int) -> dict[str, Path]:
        directory, paths = tmp_path_factory.mktemp(str(rate)), {}
        for suffix, (form, subtype, rates, most) in FORMATS.items():
            for num_channels in range(1, most + 1) if rate in rates else ():
                path = directory / f"{suffix.replace('.', '-')}-{num_channels}.{suffix}"
                soundfile.write(path, speech(rate, num_channels), rate, format=form, subtype=subtype)
                paths[path.name.removesuffix(path.suffix)] = path
        return paths

    return write


def folder_of(paths: dict[str, Path]) -> Path:
    return next(iter(paths.values())).parent


def loaded(corpus: Corpus) -> dict[str, Samples]:
    return dict(corpus.load(row) for row in range(len(corpus)))


@pytest.mark.parametrize(("rate", "channel"), CHANNELS)
def test_every_format_is_loaded_exactly_as_libsndfile_decodes_it(
    tmp_path: Path, audio: Audio, rate: int, channel: int
) -> None:
    paths = audio(rate)
    config = PrepareConfig(sampling_rate=rate, channel=channel, probe="decode")
    report = prepare_corpus([folder_of(paths)], tmp_path / "speech.corpus", config)
    paths = {name: path for name, path in paths.items() if soundfile.info(path).channels > channel}
    samples = loaded(Corpus.open(tmp_path / "speech.corpus"))
    assert set(samples) == set(paths)
    assert set(report.rejected) <= {"no_such_channel"}
    for name, path in paths.items():
        whole = decoded(path)[:, channel]
        assert len(whole) == round(SECONDS * rate), name
        np.testing.assert_array_equal(samples[name], whole, err_msg=name)
        # The samples resemble those of their own channel, as far as the codec allows, and no other channel.
        written = [np.corrcoef(whole, track)[0, 1] for track in speech(rate, 3).T]
        assert written[channel] > 0.7 > 3 * max(abs(written[i]) for i in range(3) if i != channel), name


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_every_format_is_resampled_to_the_rate_of_the_corpus(tmp_path: Path, audio: Audio, rate: int) -> None:
    paths = audio(rate)
    report = prepare_corpus([folder_of(paths)], tmp_path / "speech.corpus")
    samples = loaded(Corpus.open(tmp_path / "speech.corpus"))
    assert (set(samples), report.num_resampled) == (set(paths), len(paths))
    for name, path in paths.items():
        whole = torch.from_numpy(decoded(path)[:, 0])
        expected = torchaudio.functional.resample(whole, rate, 16000).numpy()
        assert len(samples[name]) == round(SECONDS * 16000) == len(expected), name
        np.testing.assert_allclose(samples[name], expected, atol=3e-6, err_msg=name)


# By codec: the largest error of a sample, and the number of seconds that have such errors, after a decoder starts in
# the middle of a file without the state left by earlier frames. Opus has them below 48 kHz; MP3 has them below 32 kHz,
# because its frames use bits of earlier frames.
SEEK_ERRORS = {"opus": (0.003, 9.0), "mp3": (0.5, 0.05)}


@pytest.mark.parametrize("rate", [8000, 16000, 48000])
def test_a_span_inside_a_file_equals_that_part_of_the_whole_file(tmp_path: Path, audio: Audio, rate: int) -> None:
    paths = audio(rate)
    spans = [(round(start * rate), round((0.3 + start / 3) * rate)) for start in (0.01, 0.15, 0.25, 0.5001, 0.6333)]
    rows = [
        {"audio_filepath": str(path), "offset": start / rate, "duration": length / rate}
        for path in paths.values()
        for start, length in spans
    ]
    write_jsonl(tmp_path / "spans.json", rows)
    prepare_corpus([tmp_path / "spans.json"], tmp_path / "speech.corpus", PrepareConfig(sampling_rate=rate))
    samples = loaded(Corpus.open(tmp_path / "speech.corpus"))
    assert len(samples) == len(rows)
    for name, path in paths.items():
        whole = decoded(path)[:, 0]
        for start, length in spans:
            span = samples[f"{path.with_suffix('')}@{start / rate:.3f}+{length / rate:.3f}"]
            assert_is_part(span, whole[start : start + length], name.split("-")[0], rate)


def assert_is_part(span: Samples, part: Samples, codec: str, rate: int) -> None:
    assert span.shape == part.shape
    most, seconds = SEEK_ERRORS.get(codec, (0.0, 0.0))
    begin = round(seconds * rate)
    np.testing.assert_allclose(span[:begin], part[:begin], rtol=0, atol=most, err_msg=codec)
    rounding = 2e-7 if codec == "mp3" else 0.0
    np.testing.assert_allclose(span[begin:], part[begin:], rtol=0, atol=rounding, err_msg=codec)
