import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nestdata import OutputError
from nestmodel import (
    ConfigError,
    FeatureConfig,
    NestConfig,
    NestModel,
    NestNetwork,
    WeightsError,
    load_network,
    load_weights,
    read_config,
)
from nestmodel.formats.conversion import export_model
from nestmodel.formats.huggingface import write_huggingface
from nestmodel.formats.nemo_archive import write_nemo
from tests.nestmodel.formats.models import CONFIG, STREAMING, assert_equal_states, streaming_config
from tests.synthesis import chirp
from tests.training import tiny_config

TINY = tiny_config()


SMALL_STREAMING = replace(
    streaming_config(
        att_context_style="regular",
        att_context_size=((5, 0),),
        subsampling_factor=4,
        use_bias=False,
        xscaling=False,
        conv_kernel_size=5,
    ),
    features=FeatureConfig(num_mels=31, window_length=320, hop_length=128, preemphasis=0.9, n_fft=400, normalize="NA"),
)


def exported(config: NestConfig, directory: Path) -> NestNetwork:
    """Exports a network whose biases and running statistics are not the initial ones."""
    model = NestNetwork(config).eval()
    generator = torch.Generator().manual_seed(1)
    for value in [*model.encoder.parameters(), *model.encoder.buffers()]:
        if value.is_floating_point() and value.ndim < 3:
            value.data += 0.1 * torch.rand(value.shape, generator=generator)
    write_huggingface(directory, config, model.state_dict())
    return model


def assert_equal_frames(found: Tensor, expected: Tensor) -> None:
    """Compares with a tolerance of 1e-5 of the largest magnitude."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::transformers", "ignore:::huggingface_hub")
@pytest.mark.parametrize(
    "config",
    [
        TINY,
        tiny_config(use_bias=False, xscaling=False, conv_kernel_size=5),
        replace(
            tiny_config(subsampling_factor=4, ff_expansion=2),
            features=FeatureConfig(num_mels=64, window_length=320, hop_length=128, preemphasis=0.9, n_fft=400),
        ),
        STREAMING,
        SMALL_STREAMING,
    ],
    ids=["tiny", "no biases, no scaling", "other features, by four", "streaming", "streaming, other settings"],
)
def test_transformers_computes_the_same_features_and_encoder_frames(config: NestConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = exported(config, tmp_path)
    encoder, loading = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    model_class = "NemotronAsrStreaming" if config.encoder.causal_downsampling else "Parakeet"
    assert type(encoder).__name__ == f"{model_class}Encoder"
    assert type(extractor).__name__ == f"{model_class}FeatureExtractor"
    signals = [torch.from_numpy(chirp(100, 3000, seconds)) for seconds in (1.3, 0.71, 0.2)]
    inputs = extractor([signal.numpy() for signal in signals], sampling_rate=16000, return_tensors="pt")
    audio_lens = torch.tensor([len(signal) for signal in signals])
    feats, feat_lens = model.features(torch.nn.utils.rnn.pad_sequence(signals, batch_first=True), audio_lens)
    assert inputs["attention_mask"].sum(1).tolist() == feat_lens.tolist()
    theirs = inputs["input_features"].transpose(1, 2)
    num_frames = int(feat_lens.max())
    torch.testing.assert_close(feats[..., :num_frames], theirs[..., :num_frames], rtol=0, atol=1e-3)
    with torch.no_grad():
        expected, enc_lens = model.encoder(theirs, feat_lens)
        found = encoder.eval()(**inputs)
    assert found.attention_mask.sum(1).tolist() == enc_lens.tolist()
    for row, num_valid in enumerate(enc_lens.tolist()):
        assert_equal_frames(found.last_hidden_state[row, :num_valid], expected[row, :num_valid])


def feature_chunks(extractor: Any, audio: Tensor, first: int, size: int) -> Iterator[Tensor]:
    """Yields the feature frames of chunks of audio, (1, frames, mels): `first` frames, then `size` at a time."""
    hop, n_fft = extractor.hop_length, extractor.n_fft
    padded = torch.cat([torch.zeros(n_fft // 2), audio])
    begin, end = 0, first
    while end <= len(audio) // hop:
        samples = padded[hop * begin : hop * (end - 1) + n_fft].numpy()
        yield extractor([samples], center=False, sampling_rate=16000, return_tensors="pt")["input_features"]
        begin, end = end, end + size


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::transformers", "ignore:::huggingface_hub")
@pytest.mark.parametrize("config", [STREAMING, SMALL_STREAMING], ids=["streaming", "streaming, other settings"])
def test_transformers_computes_the_same_frames_chunk_by_chunk(config: NestConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = exported(config, tmp_path)
    encoder = transformers.AutoModel.from_pretrained(tmp_path).eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    factor = config.encoder.subsampling_factor
    for context in config.encoder.att_context_size:
        right = context[1]
        first, size = 1 + factor * right, factor * (right + 1)
        num_chunks = 24 // (right + 1)  # three times the left context, so that the cache drops frames
        num_feats = first + size * (num_chunks - 1)
        num_samples = num_feats * config.features.hop_length + config.features.n_fft // 2
        audio = torch.from_numpy(chirp(100, 3000, num_samples / 16000))
        feats = list(feature_chunks(extractor, audio, first, size))
        theirs = torch.cat(feats, dim=1).transpose(1, 2)
        ours, _ = model.features(audio.unsqueeze(0), torch.tensor([len(audio)]))
        torch.testing.assert_close(theirs, ours[..., :num_feats], rtol=0, atol=1e-3)
        chunks, cache = [], {}
        for chunk in feats:
            with torch.no_grad():
                output = encoder(chunk, use_cache=True, num_lookahead_tokens=right, **cache)
            cache = {"past_key_values": output.past_key_values, "padding_cache": output.padding_cache}
            chunks.append(output.last_hidden_state[0])
        assert [len(chunk) for chunk in chunks] == [right + 1] * num_chunks
        with torch.no_grad():
            expected, _ = model.encoder(theirs, torch.tensor([num_feats]), context=context)
        assert_equal_frames(torch.cat(chunks), expected[0])


@pytest.mark.parametrize("config", [CONFIG, STREAMING, SMALL_STREAMING], ids=["whole", "streaming", "by four"])
def test_an_export_is_read_back_bit_for_bit(config: NestConfig, tmp_path: Path) -> None:
    network = NestNetwork(config)
    folder = export_model(network, "huggingface", tmp_path / "exported")
    names = {name for name in network.state_dict() if name.startswith("encoder.")}
    for given in (folder, folder / "model.safetensors"):
        assert read_config(given) == config
        assert_equal_states(NestModel(config, given, "encoder"), network, "encoder.")
        report = load_weights(NestNetwork(config), given)
        assert (set(report.loaded), report.unused, report.mismatched) == (names, (), ())
        with pytest.raises(WeightsError, match=r"the encoder and not the whole model .*--model\.init-parts encoder"):
            load_network(given)


@pytest.mark.parametrize(
    ("kind", "config", "field"),
    [
        ("Parakeet", tiny_config(conv_norm="layer_norm"), "encoder.conv_norm"),
        ("Parakeet", replace(TINY, features=FeatureConfig(num_mels=83)), "features.num_mels"),
        ("Parakeet", tiny_config(att_context_size=((8, 2),)), "encoder.att_context_size"),
        ("Parakeet", tiny_config(conv_context_size="causal"), "encoder.conv_context_size"),
        ("Parakeet", tiny_config(causal_downsampling=True), "encoder.causal_downsampling"),
        ("Parakeet", replace(TINY, features=FeatureConfig(normalize="NA")), "features.normalize"),
        ("Parakeet", replace(TINY, features=FeatureConfig(n_fft=513)), "features.n_fft"),
        ("Nemotron", streaming_config(conv_norm="batch_norm"), "encoder.conv_norm"),
        ("Nemotron", streaming_config(conv_context_size=None), "encoder.conv_context_size"),
        ("Nemotron", streaming_config(causal_downsampling=False), "encoder.causal_downsampling"),
        ("Nemotron", streaming_config(att_context_size=((-1, -1), (8, 1))), "encoder.att_context_size"),
        ("Nemotron", streaming_config(att_context_size=((8, 1), (4, 1))), "encoder.att_context_size"),
        ("Nemotron", streaming_config(att_context_size=((-1, 1),)), "encoder.att_context_size"),
        ("Nemotron", streaming_config(att_context_size=((0, 1),)), "encoder.att_context_size"),
        (
            "Nemotron",
            streaming_config(att_context_style="regular", att_context_size=((8, 1),)),
            "encoder.att_context_size",
        ),
        ("Nemotron", replace(STREAMING, features=FeatureConfig()), "features.normalize"),
        ("Nemotron", replace(STREAMING, features=FeatureConfig(normalize="NA", n_fft=513)), "features.n_fft"),
    ],
)
def test_a_model_that_no_class_of_transformers_can_hold_is_rejected(
    kind: str, config: NestConfig, field: str, tmp_path: Path
) -> None:
    section, name = field.split(".")
    value = re.escape(repr(getattr(getattr(config, section), name)))
    model = NestNetwork(config)
    with pytest.raises(ConfigError, match=f"{field} is {value}, and {kind}.*Encoder of transformers cannot hold that"):
        write_huggingface(tmp_path, config, model.state_dict())
    assert not list(tmp_path.iterdir())


def test_one_context_of_an_encoder_for_recordings_and_live_speech_is_exported(tmp_path: Path) -> None:
    network = NestNetwork(streaming_config(att_context_size=((-1, -1), (8, 3), (8, 1))))
    folder = export_model(network, "huggingface", tmp_path / "exported", context=(8, 1))
    settings = json.loads((folder / "config.json").read_text())
    assert settings["layerdrop"] == 0.0
    assert (settings["sliding_window"], settings["default_num_lookahead_tokens"]) == (9, 1)


def test_only_a_model_of_this_kind_is_replaced(tmp_path: Path) -> None:
    source = tmp_path / "whole.nemo"
    model = NestNetwork(TINY)
    write_nemo(source, TINY, model.state_dict())
    target = tmp_path / "out"
    assert export_model(source, "huggingface", target) == target
    assert sorted(path.name for path in target.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    with pytest.raises(OutputError, match=r"exists already.*pass --overwrite"):
        export_model(source, "huggingface", target)
    export_model(source, "huggingface", target, overwrite=True)
    (target / "config.json").write_text("{}")
    with pytest.raises(OutputError, match="exists already and is not a Hugging Face model"):
        export_model(source, "huggingface", target, overwrite=True)
