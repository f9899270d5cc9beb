from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nestmodel import NestModel, NestNetwork, QuantizerConfig, WeightsError, export_model, load_network, load_weights
from nestmodel.formats.weights import differing_settings
from tests.nestmodel.formats.models import CONFIG, assert_equal_states, checkpoint


@pytest.mark.parametrize("to", ["nemo", "safetensors"])
@pytest.mark.parametrize("parts", ["all", "encoder"])
def test_a_model_starts_from_every_kind_of_file(to: str, parts: str, tmp_path: Path) -> None:
    network, path = checkpoint(tmp_path)
    whole = export_model(path, to, tmp_path / "whole", parts="all")
    other_seed = replace(CONFIG, seed=6)
    fresh = NestNetwork(other_seed)
    for source in (path, whole):
        started = NestModel(other_seed, source, parts)
        assert_equal_states(started, network, "" if parts == "all" else "encoder.")
        has_initial_codebooks = torch.equal(started.quantizer.codebooks, fresh.quantizer.codebooks)
        assert has_initial_codebooks == (parts == "encoder")


def test_the_report_names_loaded_unused_missing_and_mismatched_weights(tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    deeper = replace(CONFIG, encoder=replace(CONFIG.encoder, num_layers=3), quantizer=QuantizerConfig(num_classes=64))
    network = NestNetwork(deeper)
    content = torch.load(path, weights_only=True)
    content["state_dict"]["decoder_ssl.bias"] = torch.zeros(1)
    torch.save(content, path)
    report = load_weights(network, path)
    assert report.unused == ("decoder_ssl.bias",)
    assert {name.split(".")[2] for name in report.missing} == {"2"}
    assert sorted(name.split(":")[0] for name in report.mismatched) == [
        "decoder.decoder_layers.0.bias",
        "decoder.decoder_layers.0.weight",
        "quantizer.codebooks",
    ]
    assert "quantizer.codebooks: 1 x 32 x 16 in the file, 1 x 64 x 16 in the model" in report.mismatched
    assert len(report.loaded) + len(report.missing) + len(report.mismatched) == len(network.state_dict())
    summary = report.summary()
    assert f"1 unused (decoder_ssl.bias), {len(report.missing)} missing ({report.missing[0]}, " in summary
    assert "3 mismatched" in summary


def test_differing_settings_that_do_not_show_in_shapes_raise_a_warning(tmp_path: Path) -> None:
    network, path = checkpoint(tmp_path)
    encoder = replace(CONFIG.encoder, xscaling=False, dropout=0.0, num_layers=1, checkpoint_activations=True)
    other = replace(CONFIG, encoder=encoder, features=replace(CONFIG.features, hop_length=80), seed=1)
    assert differing_settings(other, CONFIG) == (
        "features.hop_length is 80 in the model and 160 in the file",
        "encoder.xscaling is False in the model and True in the file",
    )
    with pytest.warns(UserWarning, match=r"encoder\.xscaling is False in the model and True in the file") as caught:
        NestModel(replace(CONFIG, encoder=encoder), path)
    assert len(caught) == 1
    assert load_weights(network, path).differing_settings == ()


def test_a_file_without_any_matching_weight_is_an_error(tmp_path: Path) -> None:
    wider = replace(CONFIG, encoder=replace(CONFIG.encoder, d_model=32, subsampling_channels=4, num_layers=1))
    network = NestNetwork(wider)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    foreign = tmp_path / "foreign.safetensors"
    save_file({"bert.embeddings": torch.zeros(3)}, foreign)
    with pytest.raises(WeightsError, match=r"foreign.*0 weights loaded, 1 unused .*None of them fits"):
        load_weights(network, foreign)
    front_end = tmp_path / "front_end.safetensors"
    save_file({n: v for n, v in network.state_dict().items() if n.startswith("preprocessor.")}, front_end)
    with pytest.raises(WeightsError, match=r"front_end.*None of them fits"):
        load_weights(network, front_end)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"), [("shape", "1 mismatched"), ("gone", "1 missing"), ("more", "1 unused")]
)
def test_a_whole_model_must_have_the_weights_of_its_configuration(change: str, message: str, tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    content = torch.load(path, weights_only=True)
    state = content["state_dict"]
    if change == "gone":
        del state["encoder.pre_encode.out.bias"]
    else:
        state["encoder.pre_encode.out.bias" if change == "shape" else "encoder.more"] = torch.zeros(3)
    torch.save(content, path)
    with pytest.raises(WeightsError, match=f"model.ckpt: .*{message}.*do not match the configuration"):
        load_network(path)
