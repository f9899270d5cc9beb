import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from nestdata import Corpus, PrepareConfig, prepare_corpus
from nestmodel import (
    ConfigError,
    ExtractConfig,
    ExtractError,
    NestModel,
    RejectedUtterance,
    extract_features,
    iterate_features,
)
from nestmodel.evaluate.encode import iterate_corpus, resolve_layers, stacked_mel_function
from nestmodel.evaluate.extract import file_stem
from tests.nestmodel.networks import with_statistics
from tests.synthesis import chirp, hiss, read_audio, write_audio
from tests.training import tiny_config

LENGTHS = (160, 1439, 1440, 4800, 16000, 16123, 35200)
"""Numbers of samples at 16 kHz. 160 samples are one feature frame; 1440 are the least for two encoder frames."""


@pytest.fixture(scope="module")
def model() -> NestModel:
    """A model in training mode."""
    model = NestModel(tiny_config())
    with_statistics(model).train()
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("extract") / "speech"
    for number in LENGTHS:
        write_audio(directory / f"{number}.wav", hiss(number, number) + chirp(200, 3000, number / 16000)[:number])
    return directory


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    output = folder.with_name("speech.corpus")
    prepare_corpus([folder], output, PrepareConfig(min_seconds=0.0))
    return Corpus.open(output)


@torch.no_grad()
def features_of(model: NestModel, samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns all layers of one utterance, shape (layers, enc_frames, dim), computed without batching or padding."""
    was_training = model.training
    model.eval()
    feats, feat_lens = model.features(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))
    states, enc_lens = model.encoder.hidden_states(feats, feat_lens)
    model.train(was_training)
    values: NDArray[np.float32] = torch.cat(states)[:, : int(enc_lens)].numpy()
    return values


def index_of(directory: Path) -> dict[str, dict[str, Any]]:
    lines = (directory / "index.jsonl").read_text().splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


@pytest.mark.parametrize("max_batch_seconds", [0.001, 2.5])
def test_features_do_not_depend_on_the_other_utterances_of_the_batch(
    max_batch_seconds: float, model: NestModel, corpus: Corpus, folder: Path
) -> None:
    found = list(iterate_features(model, corpus, "all", max_batch_seconds, "cpu"))
    assert [utterance.line["id"] for utterance in found] == [str(number) for number in reversed(LENGTHS)]
    for utterance in found:
        samples = read_audio(folder / f"{utterance.line['id']}.wav")
        assert utterance.values.shape == (3, -(-(len(samples) // 160) // 8), 16)
        assert np.allclose(utterance.values, features_of(model, samples), atol=1e-5)
    assert model.training  # the mode is restored


def test_a_causal_encoder_has_as_many_frames_as_others(corpus: Corpus) -> None:
    causal, usual = (NestModel(tiny_config(causal_downsampling=is_causal)) for is_causal in (True, False))
    lengths = [
        [utterance.values.shape for utterance in iterate_features(model, corpus, "last", device="cpu")]
        for model in (causal, usual)
    ]
    mels = iterate_corpus(causal, corpus, stacked_mel_function(causal), device="cpu")
    stacked = [utterance.values.shape[1] for utterance in mels]
    assert lengths[0] == lengths[1]
    assert stacked == [length for _, length, _ in lengths[0]]


def test_only_the_requested_layers_and_rows_are_yielded(model: NestModel, corpus: Corpus) -> None:
    every = {utterance.row: utterance.values for utterance in iterate_features(model, corpus, "all", device="cpu")}
    for layers, numbers in (("last", [2]), ((2, 0), [2, 0]), ([1], [1])):
        for utterance in iterate_features(model, corpus, layers, device="cpu"):
            assert np.array_equal(utterance.values, every[utterance.row][numbers])
    found = iterate_features(model, corpus, "last", device="cpu", rows=[1, 4, 3])
    assert [utterance.row for utterance in found] == [4, 3, 1]


@pytest.mark.parametrize(("layers", "shape"), [("all", (3, 28, 16)), ((1,), (28, 16))])
def test_index_and_meta_describe_every_feature_file(
    layers: Any, shape: tuple[int, ...], model: NestModel, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "speech.features"
    config = ExtractConfig(layers=layers, device="cpu")
    report = extract_features(model, [folder], output, config, model_name="tiny")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speech.features"]
    assert sorted(p.name for p in output.iterdir()) == ["features", "index.jsonl", "meta.json", "rejected.jsonl"]
    assert (report.num_utterances, report.num_frames, report.left_out) == (len(LENGTHS), 28 + 13 + 13 + 4 + 3 + 1, {})
    index = index_of(output)
    assert index.keys() == {str(number) for number in LENGTHS}
    row = index["35200"]
    values = np.load(output / row["file"])
    assert values.dtype == np.float32
    assert values.shape == shape
    numbers = resolve_layers(layers, 2)
    assert np.allclose(
        values.reshape(len(numbers), 28, 16), features_of(model, read_audio(folder / "35200.wav"))[numbers], atol=1e-5
    )
    assert row["path"] == str(folder / "35200.wav")
    described = (row["start"], row["duration"], row["num_frames"], row["num_layers"], row["dim"])
    assert described == (0.0, 2.2, 28, len(numbers), 16)
    meta = json.loads((output / "meta.json").read_text())
    assert (meta["model"], meta["layers"], meta["frame_rate_hz"], meta["num_utterances"]) == ("tiny", numbers, 12.5, 7)


def test_half_precision_is_rounded_and_its_overflow_is_an_error(model: NestModel, folder: Path, tmp_path: Path) -> None:
    config = ExtractConfig(dtype="float16", device="cpu")
    extract_features(model, [folder], tmp_path / "f", config)
    values = np.load(tmp_path / "f" / index_of(tmp_path / "f")["16000"]["file"])
    assert values.dtype == np.float16
    assert np.allclose(values, features_of(model, read_audio(folder / "16000.wav"))[-1], atol=2e-3)
    large = NestModel(tiny_config())
    with torch.no_grad():
        large.encoder.layers[1].norm_out.bias.fill_(1e5)  # type: ignore[union-attr, operator]
    with pytest.raises(ExtractError, match="overflow, values up to 1e\\+05 do not fit into float16"):
        extract_features(large, [folder], tmp_path / "g", config)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_every_id_gets_a_file_name_of_its_own_whatever_its_characters_and_length() -> None:
    ids = ["a/b", "a_b", "A_B", "../../a/b", "日本語/ü", "日本語/ö", "x" * 400, "x" * 401, "..", "-", "a\nb\0"]
    names = [file_stem(cut_id) for cut_id in ids]
    assert len({name.lower() for name in names}) == len(ids)  # unique on file systems that ignore case
    for name in names:
        assert name.isascii()
        assert len(name) < 110
        assert "/" not in name
        assert not name.startswith((".", "-"))
    assert names[0] == "a_b-" + names[0][-20:]


def test_broken_files_are_listed_and_the_other_files_are_written(
    model: NestModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "in"
    for name in ("good.flac", "late.flac", "fine.flac"):
        write_audio(folder / name, hiss(32000, len(name)))
    write_audio(folder / "short.wav", hiss(159, 3))
    (folder / "broken.wav").write_bytes(b"no audio at all")
    write_audio(folder / "nan.wav", np.full(8000, np.nan, np.float32), subtype="FLOAT")
    # The header and the last frame are intact, so the error appears only when the file is decoded.
    late = bytearray((folder / "late.flac").read_bytes())
    late[20000:20100] = bytes(100)
    (folder / "late.flac").write_bytes(late)
    (folder / "cut.flac").write_bytes((folder / "good.flac").read_bytes()[:20000])
    with caplog.at_level("WARNING"):
        report = extract_features(model, [folder], tmp_path / "f", ExtractConfig(device="cpu"))
    assert "files that are cut off: 1, such as" in caplog.text
    assert "cut.flac, used up to" in caplog.text
    assert index_of(tmp_path / "f").keys() == {"good", "fine", "cut"}
    lines = map(json.loads, (tmp_path / "f" / "rejected.jsonl").read_text().splitlines())
    rejects = {row["cut_id"]: row for row in lines}
    reasons = {name: row["reason"] for name, row in rejects.items()}
    assert reasons == {"broken": "unreadable", "late": "unreadable", "nan": "not_finite", "short": "too_short"}
    assert "159 samples at 16000 Hz are less than one encoder frame" in rejects["short"]["detail"]
    assert "late.flac" in rejects["late"]["where"]
    assert report.left_out == dict(Counter(reasons.values()))


def test_an_utterance_too_large_for_memory_is_rejected_and_a_batch_too_large_is_an_error(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = NestModel(tiny_config())
    hidden_states = model.encoder.hidden_states

    def limited(feats: torch.Tensor, feat_lens: torch.Tensor) -> Any:
        if feats.shape[0] * feats.shape[2] > 150:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        return hidden_states(feats, feat_lens)

    monkeypatch.setattr(model.encoder, "hidden_states", limited)
    rejected: list[RejectedUtterance] = []
    found = list(iterate_features(model, corpus, "last", 0.1, "cpu", on_reject=rejected.append))
    assert len(found) == len(LENGTHS) - 1
    assert [(reject.cut_id, reject.reason) for reject in rejected] == [("35200", "out_of_memory")]
    with pytest.raises(ExtractError, match=r"a batch of 7 utterances, 15 s with padding, .* --max-batch-seconds"):
        list(iterate_features(model, corpus, "last", 100.0, "cpu", on_reject=rejected.append))


def test_audio_at_another_rate_is_resampled_and_a_corpus_at_another_rate_is_refused(
    model: NestModel, tmp_path: Path
) -> None:
    soundfile.write(write_audio(tmp_path / "in" / "a.wav", hiss(100, 0)), hiss(8000, 0), 8000)
    report = extract_features(model, [tmp_path / "in"], tmp_path / "f", ExtractConfig(device="cpu"))
    assert report.num_frames == 13
    prepare_corpus([tmp_path / "in"], tmp_path / "a.corpus", PrepareConfig(sampling_rate=8000))
    with pytest.raises(ConfigError, match="at 8000 Hz and the model at 16000 Hz"):
        extract_features(model, Corpus.open(tmp_path / "a.corpus"), tmp_path / "g")


def test_layers_are_checked_against_the_encoder() -> None:
    assert resolve_layers("all", 3) == [0, 1, 2, 3]
    assert resolve_layers("last", 3) == [3]
    assert resolve_layers((3, 0), 3) == [3, 0]
    for layers in ((4,), (-1,), (0, 0), (1, 2, 1)):
        with pytest.raises(ConfigError, match=r"to 3 \(the output of the last block"):
            resolve_layers(layers, 3)
