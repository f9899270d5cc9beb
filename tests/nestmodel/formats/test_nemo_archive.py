import gzip
import io
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nestmodel import (
    FeatureConfig,
    MaskConfig,
    NestConfig,
    NestModel,
    NestNetwork,
    OptimizerConfig,
    QuantizerConfig,
    WeightsError,
    load_network,
)
from nestmodel.formats.nemo_archive import write_nemo
from nestmodel.formats.nemo_config import config_to_nemo
from tests.nestmodel.formats.models import members_of, streaming_config
from tests.training import tiny_config

GOLDEN = Path(__file__).parents[2] / "golden" / "nemo_tiny.npz"
TINY = tiny_config()
CONFIGS = {
    "tiny": TINY,
    "odd sizes": replace(
        TINY,
        features=FeatureConfig(
            sampling_rate=22050, n_fft=1024, window_length=551, hop_length=221, num_mels=83, dither=0.0, preemphasis=0.0
        ),
        quantizer=QuantizerConfig(num_classes=10, num_codebooks=3, code_dim=4, distance="cosine"),
        masking=MaskConfig(block_size=24, prob=0.03, threshold=0.5),
        encoder=tiny_config(subsampling_factor=4, conv_kernel_size=31, use_bias=False, xscaling=False).encoder,
        optimizer=OptimizerConfig(lr=2.0, betas=(0.8, 0.9), weight_decay=0.0, warmup_steps=7, min_lr=1e-7),
    ),
    "layer norm": tiny_config(conv_norm="layer_norm", ff_expansion=2),
    "streaming": streaming_config(att_context_size=((6, 2), (-1, 0)), att_context_probs=(0.25, 0.75)),
    "v2": replace(TINY, quantizer=replace(TINY.quantizer, input_norm="frames")),
    "cosine": replace(TINY, optimizer=OptimizerConfig(schedule="cosine", lr=1e-3, warmup_steps=10)),
    "post_conv": replace(TINY, masking=MaskConfig(position="post_conv", block_size=44)),
}


def tar_of(members: Mapping[str, bytes], path: Path, *, compressed: bool = False) -> Path:
    """Writes a tar file with the given members."""
    with tarfile.open(path, "w:gz" if compressed else "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def archive(path: Path, config: NestConfig = TINY, **changes: Any) -> Path:
    """Writes a new model as a NeMo file, with other values in sections of its configuration, or without a section."""
    write_nemo(path, config, NestNetwork(config).state_dict())
    members = members_of(path)
    section = yaml.safe_load(members["./model_config.yaml"])
    for name, change in changes.items():
        section[name] = section[name] | change if isinstance(change, dict) else change
    members["./model_config.yaml"] = yaml.safe_dump(section).encode()
    return tar_of(members, path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("d_model", 32, "mismatched .*do not match the configuration"),
        ("d_model", 1_000_000, "mismatched .*do not match the configuration"),
        ("n_layers", 1_000_000, "encoder.num_layers is 1000000: expected 1000 or less"),
        ("subsampling_conv_channels", 2**62, "impossible sizes"),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused_and_take_no_memory(
    tmp_path: Path, name: str, value: int, message: str
) -> None:
    with pytest.raises(WeightsError, match=message):
        load_network(archive(tmp_path / "large.nemo", encoder={name: value}))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_nemo_file_keeps_a_model_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = NestNetwork(CONFIGS[name])
    write_nemo(tmp_path / "model.nemo", model.config, model.state_dict())
    back = load_network(tmp_path / "model.nemo")
    assert back.config == model.config
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in model.state_dict().items())


def test_files_in_the_variants_that_nemo_writes_can_be_read(tmp_path: Path) -> None:
    model = NestNetwork(TINY)
    state = model.state_dict()
    # Codebooks as NeMo stores them, and a parameter that released files contain.
    stored = {**state, "quantizer.codebooks": state["quantizer.codebooks"].double(), "decoder_ssl.w": torch.ones(3)}
    weights = io.BytesIO()
    torch.save(stored, weights)
    section = {**config_to_nemo(TINY), "nemo_version": "2.5.0", "labels": None}
    members = {
        "model_weights.ckpt": weights.getvalue(),
        "notes.txt": b"more",
        "model_config.yaml": yaml.safe_dump(section).encode(),
    }
    back = load_network(tar_of(members, tmp_path / "their.nemo", compressed=True))
    assert back.config == TINY
    assert back.quantizer.codebooks.dtype == torch.float32
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in state.items())


def test_a_model_masked_after_the_subsampling_is_stored_under_the_names_of_nemos_wrapper(tmp_path: Path) -> None:
    model = NestNetwork(CONFIGS["post_conv"])
    write_nemo(tmp_path / "model.nemo", model.config, model.state_dict())
    state = torch.load(io.BytesIO(members_of(tmp_path / "model.nemo")["./model_weights.ckpt"]), weights_only=True)
    own = {name for name in state if name.startswith("encoder.pre_encode.")}
    assert all(name.startswith(("encoder.pre_encode.pre_encode.", "encoder.pre_encode.masking.")) for name in own)
    assert {name.removeprefix("encoder.pre_encode.") for name in own} == {
        name.removeprefix("pre_encoder.") for name in state if name.startswith("pre_encoder.")
    }


def test_a_block_size_that_nemo_has_divided_is_restored(tmp_path: Path) -> None:
    """The archive has the values that NeMo's `save_to` writes for a model that masks encoder frames."""
    config = CONFIGS["post_conv"]
    masking, quantizer = {"block_size": config.masking.block_size // 8, "feat_in": 16}, {"feat_in": 16}
    path = archive(
        tmp_path / "saved.nemo", config, masking=masking, quantizer=quantizer, loss={"combine_time_steps": 1}
    )
    back = load_network(path)
    assert back.config.masking.block_size == 40
    assert back.mask_processor.block_size == NestNetwork(config).mask_processor.block_size


def test_a_model_with_an_unknown_schedule_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = {"name": "PolynomialHoldDecayAnnealing"}
    back = load_network(archive(tmp_path / "polynomial.nemo", optim={"sched": schedule}))
    assert back.config == replace(TINY, optimizer=OptimizerConfig())
    assert "model.optim.sched.name is 'PolynomialHoldDecayAnnealing'" in caplog.text


@pytest.mark.parametrize(
    ("config", "version", "warning"),
    [
        (TINY, "3.0.0", None),
        (TINY, "3.1.0", "a configuration of NeMo 3.1.0 does not tell"),
        (CONFIGS["v2"], "3.1.0", "the model is NEST v2"),
        (CONFIGS["v2"], None, None),  # of this package
        (replace(CONFIGS["v2"], masking=MaskConfig(position="post_conv")), "3.1.0", None),  # both norms are the same
    ],
)
def test_a_file_of_nemo_that_may_have_another_norm_is_named_in_a_warning(
    config: NestConfig, version: str | None, warning: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = archive(tmp_path / "saved.nemo", config, **({"nemo_version": version} if version else {}))
    assert load_network(path).config == config
    assert (f"{path}: {warning}" in caplog.text) if warning else not caplog.text
    assert ("--model.config.quantizer.input-norm stacked" in caplog.text) == (warning == "the model is NEST v2")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut short", "cannot be read"),
        ("compressed and cut short", "cannot be read"),
        ("./model_config.yaml", "a tar file without model_config.yaml"),
        ("./model_weights.ckpt", "a tar file without model_weights.ckpt"),
        ("config is not YAML", "cannot be read"),
        ("weights are damaged", "cannot be read"),
    ],
)
def test_a_broken_file_raises_one_line_that_names_it(kind: str, message: str, tmp_path: Path) -> None:
    write_nemo(tmp_path / "whole.nemo", TINY, NestNetwork(TINY).state_dict())
    members = members_of(tmp_path / "whole.nemo")
    if kind in members:
        del members[kind]
    elif kind == "config is not YAML":
        members["./model_config.yaml"] = b"a: [1"
    elif kind == "weights are damaged":
        members["./model_weights.ckpt"] = members["./model_weights.ckpt"][:-3000]
    path = tar_of(members, tmp_path / "broken.nemo")
    if kind.endswith("cut short"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if kind == "cut short" else gzip.compress(whole)[:-4000])
    with pytest.raises(WeightsError, match=message) as caught:
        load_network(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_encoder_is_loaded_from_a_model_of_another_kind(tmp_path: Path) -> None:
    """A speech recognition model has another configuration and another decoder, but the same encoder."""
    model = NestNetwork(TINY)
    write_nemo(tmp_path / "model.nemo", TINY, model.state_dict())
    members = members_of(tmp_path / "model.nemo")
    members["./model_config.yaml"] = yaml.safe_dump({"target": "EncDecCTCModel", "decoder": {}}).encode()
    state: dict[str, Any] = {n: v for n, v in model.state_dict().items() if n.startswith("encoder.")}
    file = io.BytesIO()
    torch.save({**state, "decoder.decoder_layers.0.weight": torch.zeros(3, 3)}, file)
    members["./model_weights.ckpt"] = file.getvalue()
    path = tar_of(members, tmp_path / "ctc.nemo")
    started = NestModel(replace(TINY, seed=9), path, "encoder")
    assert all(torch.equal(value, started.state_dict()[name]) for name, value in state.items())
    with pytest.raises(WeightsError, match=r"ctc\.nemo: model\."):
        load_network(path)


MEMBERS = ("model_config.yaml", "model_weights.ckpt")


@pytest.mark.parametrize("name", [*MEMBERS, "other"])
def test_a_small_archive_with_a_large_member_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    members = {name: bytes(20 << 20), **{other: b"{}" for other in MEMBERS if other != name}}
    path = tar_of(members, tmp_path / "bomb.nemo", compressed=True)
    assert path.stat().st_size < 1 << 18
    with pytest.raises(WeightsError, match=rf"{name}' has 20,971,520 bytes, more than a model of this size"):
        load_network(path)


def test_damaged_weights_in_an_archive_are_found(tmp_path: Path) -> None:
    model, path = NestNetwork(TINY), tmp_path / "model.nemo"
    write_nemo(path, model.config, model.state_dict())
    content, weight = path.read_bytes(), next(iter(model.encoder.parameters())).detach().numpy().tobytes()
    at = content.index(weight) + 8
    path.write_bytes(content[:at] + b"\1\2\3\4" + content[at + 4 :])
    with pytest.raises(WeightsError, match=r"model\.nemo: damaged: the checksum of"):
        load_network(path)
