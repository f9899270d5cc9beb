from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchaudio
from lhotse import AudioSource, CutSet, Recording

from nestdata import Corpus, PrepareConfig, prepare_corpus
from nestdata.audio.decode import load_samples
from tests.nestdata.prepare.inputs.shards import tar_corpus
from tests.synthesis import Samples, folder_corpus, hiss, read_audio, write_audio, write_jsonl

MIX = PrepareConfig(channel="mix")


def mean_of(path: Path) -> Samples:
    """Returns the average of the channels of a file, summed in single precision from the first to the last."""
    channels = read_audio(path).reshape(len(read_audio(path)), -1)
    total = channels[:, 0].copy()
    for number in range(1, channels.shape[1]):
        total += channels[:, number]
    mean: Samples = total / np.float32(channels.shape[1])
    return mean


def tracks(num_channels: int, num_samples: int = 16000) -> Samples:
    return np.stack([hiss(num_samples, seed) for seed in range(num_channels)], axis=1)


@pytest.mark.parametrize(("name", "num_channels"), [("a.wav", 2), ("a.flac", 3), ("a.ogg", 1)])
def test_mix_is_the_average_of_all_channels(tmp_path: Path, name: str, num_channels: int) -> None:
    files = folder_corpus(tmp_path / "speech", {name: tracks(num_channels)}, MIX)
    expected = mean_of(tmp_path / "speech" / name)
    for corpus in (files, tar_corpus(tmp_path / "speech", MIX)):
        np.testing.assert_array_equal(corpus.load(0)[1], expected[: corpus.num_samples_of(0)])
        np.testing.assert_array_equal(corpus.load(0, start=100, num_samples=900)[1], expected[100:1000])


def test_mix_is_averaged_before_it_is_resampled(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.flac": (tracks(2, 48000), 48000)}, MIX)
    mean = torch.from_numpy(mean_of(tmp_path / "speech" / "a.flac"))
    expected = torchaudio.functional.resample(mean, 48000, 16000).numpy()
    np.testing.assert_allclose(corpus.load(0)[1], expected, atol=1e-6)


@pytest.mark.parametrize("probe", ["missing", "decode"])
def test_mixed_cuts_open_in_lhotse_as_their_first_channel(tmp_path: Path, probe: Any) -> None:
    write_audio(tmp_path / "audio" / "a.wav", tracks(3))
    manifest = write_jsonl(tmp_path / "m.json", [{"audio_filepath": "audio/a.wav", "duration": 1.0, "mood": "calm"}])
    config = PrepareConfig(channel="mix", probe=probe, window_seconds=0.5)
    prepare_corpus([manifest], tmp_path / "speech.corpus", config)
    corpus = Corpus.open(tmp_path / "speech.corpus")
    expected = mean_of(tmp_path / "audio" / "a.wav")
    cuts = [*CutSet.from_file(corpus.path / "cuts.jsonl")]
    assert len(cuts) == 2
    for i, cut in enumerate(cuts):
        assert cut.custom == {"mood": "calm", "nest_channel": "mix"}
        span = slice(8000 * i, 8000 * (i + 1))
        np.testing.assert_array_equal(corpus.load(i)[1], expected[span])
        np.testing.assert_array_equal(cut.load_audio()[0], read_audio(tmp_path / "audio" / "a.wav")[span, 0])
        np.testing.assert_array_equal(load_samples(cut), expected[span])
    assert corpus.meta["settings"]["channel"] == "mix"


def test_mix_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    audio = {"a.wav": tracks(2)}
    found = [folder_corpus(tmp_path / str(c), audio, PrepareConfig(channel=c)).fingerprint for c in ("mix", 0, 1)]  # type: ignore[arg-type]
    assert len({*found}) == 3
    assert tar_corpus(tmp_path / "mix", MIX).fingerprint == found[0]


def test_mix_of_a_lhotse_recording_needs_its_channels_in_one_file(tmp_path: Path) -> None:
    stereo = write_audio(tmp_path / "stereo.wav", tracks(2))
    mono = write_audio(tmp_path / "mono.wav", tracks(1))
    divided = [AudioSource("file", [0], str(mono)), AudioSource("file", [1], str(mono))]
    recordings = [
        Recording("one", [AudioSource("file", [0, 1], str(stereo))], 16000, 16000, 1.0),
        Recording("several", divided, 16000, 16000, 1.0),
    ]
    manifest = write_jsonl(tmp_path / "recordings.jsonl", [recording.to_dict() for recording in recordings])
    report = prepare_corpus([manifest], tmp_path / "speech.corpus", MIX)
    assert report.rejected == {"no_such_channel": 1}
    np.testing.assert_array_equal(Corpus.open(tmp_path / "speech.corpus").load(0)[1], mean_of(stereo))
