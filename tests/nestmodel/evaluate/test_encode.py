import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from nestdata import AudioError
from nestdata import ConfigError as DataConfigError
from nestmodel import (
    AudioFeatures,
    ConfigError,
    ExtractConfig,
    ExtractError,
    NestNetwork,
    RejectedUtterance,
    WeightsError,
    encode,
    extract_features,
    iterate_features,
    save_network,
)
from tests.training import tiny_config

RATE = 16000


@pytest.fixture(scope="module")
def model() -> NestNetwork:
    return NestNetwork(tiny_config())


def noise(seconds: float, rate: int = RATE, seed: int = 0) -> Any:
    return (0.1 * np.random.default_rng(seed).standard_normal(int(seconds * rate))).astype(np.float32)


def test_a_file_has_the_features_that_extract_features_writes(model: NestNetwork, tmp_path: Path) -> None:
    audio = {"short": noise(0.7), "long": noise(2.3, 44100, seed=1)}
    soundfile.write(tmp_path / "short.flac", audio["short"], RATE)
    soundfile.write(tmp_path / "long.wav", audio["long"], 44100, subtype="FLOAT")
    lines = [json.dumps({"audio_filepath": name}) for name in ("short.flac", "long.wav")]
    (tmp_path / "both.json").write_text("\n".join(lines) + "\n")
    # A limit below every length: each utterance is a batch by itself.
    config = ExtractConfig(layers="all", max_batch_seconds=0.1, device="cpu")
    report = extract_features(model, [tmp_path / "both.json"], tmp_path / "features", config)
    index = [json.loads(line) for line in (report.path / "index.jsonl").read_text().splitlines()]
    expected = {Path(row["path"]).name: np.load(report.path / row["file"]) for row in index}

    for name, path in (("short.flac", tmp_path / "short.flac"), ("long.wav", str(tmp_path / "long.wav"))):
        features = encode(model, path, layers="all")
        assert isinstance(features.values, torch.Tensor)
        assert features.frame_rate_hz == report.frame_rate_hz
        np.testing.assert_array_equal(features.values.numpy(), expected[name])
    last = encode(model, tmp_path / "long.wav")
    np.testing.assert_array_equal(last.values.numpy(), expected["long.wav"][-1])
    array = encode(model, audio["long"], sampling_rate=44100, layers=(0, 2))
    np.testing.assert_array_equal(array.values.numpy(), expected["long.wav"][[0, 2]])


def test_the_path_of_a_network_is_taken_in_its_place(model: NestNetwork, tmp_path: Path) -> None:
    checkpoint = save_network(model, tmp_path / "last.ckpt")
    soundfile.write(tmp_path / "talk.wav", noise(1.0), RATE, subtype="FLOAT")
    expected = encode(model, tmp_path / "talk.wav").values.numpy()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for path in (checkpoint, str(checkpoint)):
        found = encode(path, tmp_path / "talk.wav").values.numpy()
        if device == "cpu":
            np.testing.assert_array_equal(found, expected)
        (utterance,) = iterate_features(path, tmp_path / "talk.wav", "last", device="cpu")
        np.testing.assert_array_equal(utterance.values[0], expected)
    report = extract_features(path, tmp_path / "talk.wav", tmp_path / "features", ExtractConfig(device="cpu"))
    assert report.num_frames == len(expected)
    with pytest.raises(WeightsError, match=r"gone\.ckpt"):
        encode("gone.ckpt", tmp_path / "talk.wav")


def test_tensors_are_read_like_arrays_and_the_mode_of_the_model_is_kept(model: NestNetwork) -> None:
    samples = noise(1.0, 8000)
    model.train()
    first, second = (encode(model, each, sampling_rate=8000) for each in (samples, torch.from_numpy(samples)))
    assert model.training
    assert torch.equal(first.values, second.values)
    assert not first.values.requires_grad
    assert isinstance(first, AudioFeatures)


def test_what_cannot_be_encoded_is_one_error(model: NestNetwork, tmp_path: Path) -> None:
    with pytest.raises(AudioError, match=r"gone\.wav does not exist"):
        encode(model, tmp_path / "gone.wav")
    with pytest.raises(DataConfigError, match="the sampling rate of the array is None"):
        encode(model, noise(1.0))
    with pytest.raises(ExtractError, match="the array: too_short, 10 samples at 16000 Hz"):
        encode(model, noise(1.0)[:10], sampling_rate=RATE)
    with pytest.raises(DataConfigError, match=r"shape \(2, 8000\)"):
        encode(model, torch.zeros(2, 8000), sampling_rate=RATE)
    with pytest.raises(Exception, match="layers is '9'"):
        encode(model, noise(1.0), sampling_rate=RATE, layers=(9,))


def test_iterate_features_takes_files_folders_and_cuts(model: NestNetwork, tmp_path: Path) -> None:
    from lhotse import CutSet, Recording

    soundfile.write(tmp_path / "a.wav", noise(1.0), RATE, subtype="FLOAT")
    (tmp_path / "b.wav").write_text("text")
    expected = encode(model, tmp_path / "a.wav").values.numpy()
    cuts = CutSet.from_cuts([Recording.from_file(tmp_path / "a.wav").to_cut()])
    rejected: list[RejectedUtterance] = []
    for inputs in (tmp_path / "a.wav", str(tmp_path / "a.wav"), [tmp_path / "a.wav"], tmp_path, cuts):
        (found,) = iterate_features(model, inputs, "last", device="cpu", on_reject=rejected.append)
        np.testing.assert_array_equal(found.values[0], expected)
    assert [reject.reason for reject in rejected] == ["unreadable"]  # in the folder
    with pytest.raises(ExtractError, match=r"unreadable, .*b\.wav"):
        list(iterate_features(model, tmp_path, "last", device="cpu"))
    with pytest.raises(ConfigError, match="rows are indices of a Corpus"):
        iterate_features(model, tmp_path, rows=[0])
