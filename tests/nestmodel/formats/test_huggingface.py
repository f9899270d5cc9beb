import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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
from tests.nestmodel.formats.models import CONFIG, assert_equal_states, checkpoint
from tests.synthesis import chirp
from tests.training import tiny_config

TINY = tiny_config()


def exported(config: NestConfig, directory: Path) -> NestNetwork:
    """Exports a network whose biases and running statistics are not the initial ones."""
    model = NestNetwork(config).eval()
    generator = torch.Generator().manual_seed(1)
    for value in [*model.encoder.parameters(), *model.encoder.buffers()]:
        if value.is_floating_point() and value.ndim < 3:
            value.data += 0.1 * torch.rand(value.shape, generator=generator)
    write_huggingface(directory, config, model.state_dict())
    return model


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::transformers", "ignore:::huggingface_hub")
@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, encoder=replace(TINY.encoder, use_bias=False, xscaling=False, conv_kernel_size=5)),
        replace(
            TINY,
            features=FeatureConfig(num_mels=64, window_length=320, hop_length=128, preemphasis=0.9, n_fft=400),
            encoder=replace(TINY.encoder, subsampling_factor=4, ff_expansion=2),
        ),
    ],
    ids=["tiny", "no biases, no scaling", "other features, by four"],
)
def test_transformers_computes_the_same_features_and_encoder_frames(config: NestConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = exported(config, tmp_path)
    encoder, loading = transformers.ParakeetEncoder.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    extractor = transformers.ParakeetFeatureExtractor.from_pretrained(tmp_path)
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
        torch.testing.assert_close(found.last_hidden_state[row, :num_valid], expected[row, :num_valid])


def test_an_export_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    network, path = checkpoint(tmp_path)
    folder = export_model(path, "huggingface", tmp_path / "exported")
    names = {name for name in network.state_dict() if name.startswith("encoder.")}
    for given in (folder, folder / "model.safetensors"):
        assert read_config(given) == CONFIG
        assert_equal_states(NestModel(CONFIG, given, "encoder"), network, "encoder.")
        report = load_weights(NestNetwork(CONFIG), given)
        assert (set(report.loaded), report.unused, report.mismatched) == (names, (), ())
        with pytest.raises(WeightsError, match=r"the encoder and not the whole model .*--model\.init-parts encoder"):
            load_network(given)


def test_layers_are_not_dropped_in_training(tmp_path: Path) -> None:
    exported(TINY, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layerdrop"] == 0.0


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(TINY, encoder=replace(TINY.encoder, conv_norm="layer_norm")), "encoder.conv_norm is 'layer_norm'"),
        (replace(TINY, features=FeatureConfig(num_mels=83)), "features.num_mels is 83"),
        (tiny_config(att_context_size=((8, 2),)), r"encoder.att_context_size is \(\(8, 2\),\)"),
        (tiny_config(conv_context_size="causal"), "encoder.conv_context_size is 'causal'"),
    ],
)
def test_a_model_that_parakeet_cannot_hold_is_rejected(config: NestConfig, field: str, tmp_path: Path) -> None:
    model = NestNetwork(config)
    with pytest.raises(ConfigError, match=f"{field}, and ParakeetEncoder .* cannot hold that: "):
        write_huggingface(tmp_path, config, model.state_dict())
    assert not list(tmp_path.iterdir())


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
