import ast
import copy
import json
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nestmodel
from nestmodel.config import (
    EncoderConfig,
    FeatureConfig,
    MaskConfig,
    NestConfig,
    OptimizerConfig,
    QuantizerConfig,
)
from nestmodel.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "nemo_tiny.npz"
SECTIONS = (FeatureConfig, QuantizerConfig, MaskConfig, EncoderConfig, OptimizerConfig)


@pytest.fixture(scope="module")
def nemo_section() -> Mapping[str, Any]:
    with np.load(GOLDEN) as arrays:
        section: Mapping[str, Any] = json.loads(str(arrays["config"]))
    return section


def changed(section: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of a NeMo section with one field set, such as encoder.d_model."""
    copied = copy.deepcopy(dict(section))
    *parents, key = path.split(".")
    place = copied
    for parent in parents:
        place = place[parent]
    place[key] = value
    return copied


@pytest.mark.parametrize(
    ("name", "d_model", "num_heads", "num_layers", "weight_decay", "scales_and_biases"),
    [
        ("small", 176, 4, 16, 0.0, True),
        ("medium", 256, 4, 16, 1e-3, True),
        ("large", 512, 8, 17, 1e-3, True),
        ("xlarge", 1024, 8, 24, 1e-3, False),
    ],
)
def test_preset_has_the_size_of_the_paper(
    name: str, d_model: int, num_heads: int, num_layers: int, weight_decay: float, scales_and_biases: bool
) -> None:
    encoder = EncoderConfig(
        d_model=d_model,
        num_heads=num_heads,
        num_layers=num_layers,
        xscaling=scales_and_biases,
        use_bias=scales_and_biases,
    )
    expected = NestConfig(encoder=encoder, optimizer=OptimizerConfig(weight_decay=weight_decay))
    assert NestConfig.preset(name) == expected


def test_demo_preset_is_smaller_than_small() -> None:
    assert NestConfig.preset("demo").encoder.d_model < NestConfig.preset("small").encoder.d_model


def test_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'huge' is .*\. The presets are demo, large, medium, small, xlarge"):
        NestConfig.preset("huge")


def test_a_config_survives_being_written_out_and_read_back() -> None:
    config = NestConfig.preset("demo")
    assert NestConfig.from_dict(asdict(config)) == config
    assert NestConfig.from_dict(json.loads(json.dumps(asdict(config)))) == config


def test_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    values = asdict(NestConfig.preset("demo"))
    values["encoder"]["num_layer"] = 3
    with pytest.raises(ConfigError, match=r"encoder\.num_layer is unknown: did you mean 'num_layers'"):
        NestConfig.from_dict(values)


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"encoder is incomplete.*num_heads"):
        NestConfig.from_dict({"encoder": {"d_model": 8, "num_layers": 1}})


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("encoder", "num_layers", "2", "expected int"),
        ("encoder", "num_layers", True, "expected int"),
        ("encoder", "xscaling", 1, "expected bool"),
        ("optimizer", "min_lr", "1e-6", r"expected float. Write numbers with a point, such as 1\.0e-5"),
        ("optimizer", "betas", [0.9], "expected tuple"),
        ("features", "dither", None, "expected float"),
    ],
)
def test_value_of_the_wrong_type_is_refused(section: str, key: str, value: object, message: str) -> None:
    values = asdict(NestConfig.preset("demo"))
    values[section][key] = value
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is .*{message}"):
        NestConfig.from_dict(values)


def test_section_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="encoder is 'large': expected a mapping"):
        NestConfig.from_dict({"encoder": "large"})


def test_whole_numbers_serve_as_floats() -> None:
    values = asdict(NestConfig.preset("demo"))
    values["optimizer"]["lr"] = 5
    lr = NestConfig.from_dict(values).optimizer.lr
    assert (type(lr), lr) == (float, 5.0)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("features", "sampling_rate", 0),
        ("features", "n_fft", 0),
        ("features", "window_length", 513),
        ("features", "hop_length", 0),
        ("features", "num_mels", 0),
        ("features", "dither", -1e-5),
        ("features", "pad_to", 0),
        ("features", "pad_to", 12),
        ("features", "preemphasis", 1.0),
        ("quantizer", "num_classes", 1),
        ("quantizer", "num_codebooks", 0),
        ("quantizer", "code_dim", 0),
        ("masking", "block_size", 0),
        ("masking", "position", "pre"),
        ("quantizer", "distance", "cos"),
        ("encoder", "conv_norm", None),
        ("masking", "prob", 1.1),
        ("masking", "threshold", 1.0),
        ("encoder", "d_model", 7),
        ("encoder", "d_model", 150),
        ("encoder", "num_heads", 0),
        ("encoder", "num_layers", 0),
        ("encoder", "subsampling_channels", 0),
        ("encoder", "subsampling_factor", 1),
        ("encoder", "subsampling_factor", 6),
        ("encoder", "ff_expansion", 0),
        ("encoder", "conv_kernel_size", 8),
        ("encoder", "dropout", 1.0),
        ("encoder", "dropout_pre_encoder", -0.1),
        ("encoder", "dropout_att", 1.5),
        ("encoder", "dropout_emb", 1.0),
        ("optimizer", "lr", 0.0),
        ("optimizer", "betas", (0.9, 1.0)),
        ("optimizer", "weight_decay", -1.0),
        ("optimizer", "warmup_steps", 0),
        ("optimizer", "min_lr", -1e-6),
    ],
)
def test_value_out_of_range_is_refused_under_its_name(section: str, key: str, value: object) -> None:
    values = asdict(NestConfig.preset("demo"))
    values[section][key] = value
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is .*: expected "):
        NestConfig.from_dict(values)


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        NestConfig.preset("demo").seed = 1  # type: ignore[misc]


def test_every_field_is_read_by_code_outside_the_config() -> None:
    folder = Path(nestmodel.__file__).parent
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py") if path.name != "config.py"]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {field.name for section in (*SECTIONS, NestConfig) for field in fields(section)}
    assert names <= read


def test_nemo_section_becomes_a_config(nemo_section: Mapping[str, Any]) -> None:
    config = NestConfig.from_nemo(nemo_section)
    assert config.features == FeatureConfig(dither=0.0)
    assert config.quantizer == QuantizerConfig(num_classes=128)
    assert config.masking == MaskConfig()
    assert config.encoder == EncoderConfig(d_model=64, num_heads=4, num_layers=2, subsampling_channels=32)
    assert config.optimizer == OptimizerConfig()


def test_nemo_variants_become_settings(nemo_section: Mapping[str, Any]) -> None:
    section = changed(nemo_section, "quantizer.dist_fn", "cosine")
    section = changed(section, "encoder.conv_norm_type", "layer_norm")
    config = NestConfig.from_nemo(section)
    assert (config.quantizer.distance, config.encoder.conv_norm) == ("cosine", "layer_norm")


@pytest.mark.parametrize(("feat_in", "steps_combined"), [(80, 8), (64, 1)])
def test_nemo_masks_after_the_subsampling_whatever_it_then_overwrites(
    nemo_section: Mapping[str, Any], feat_in: int, steps_combined: int
) -> None:
    section = changed(nemo_section, "mask_position", "post_conv")
    section = changed(section, "loss.combine_time_steps", steps_combined)
    section = changed(section, "quantizer.feat_in", feat_in)
    with pytest.raises(ConfigError, match=r"model\.quantizer\.combine_time_steps is 8, .* only 1 is"):
        NestConfig.from_nemo(section)
    config = NestConfig.from_nemo(changed(section, "quantizer.combine_time_steps", 1))
    assert config.masking == MaskConfig(position="post_conv")


def test_masks_after_the_subsampling_are_a_frame_long_at_least() -> None:
    values = asdict(NestConfig.preset("demo"))
    values["masking"] |= {"position": "post_conv", "block_size": 7}
    with pytest.raises(ConfigError, match=r"masking\.block_size is 7: expected one encoder frame \(8\) or more"):
        NestConfig.from_dict(values)


def test_nemo_section_without_optimizer_gets_the_default_one(nemo_section: Mapping[str, Any]) -> None:
    section = {key: value for key, value in nemo_section.items() if key != "optim"}
    assert NestConfig.from_nemo(section).optimizer == OptimizerConfig()


def test_nemo_n_fft_of_null_is_the_next_power_of_two(nemo_section: Mapping[str, Any]) -> None:
    assert NestConfig.from_nemo(changed(nemo_section, "preprocessor.n_fft", None)).features.n_fft == 512


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mask_position", "post_norm"),
        ("preprocessor.normalize", "all_features"),
        ("preprocessor.window", "hamming"),
        ("preprocessor.log", False),
        ("preprocessor.exact_pad", True),
        ("preprocessor.highfreq", 4000),
        ("preprocessor.new_field", 1),
        ("masking.allow_overlap", False),
        ("masking.freeze", False),
        ("masking.mask_value", 0.0),
        ("masking.max_mask_ratio", 0.5),
        ("quantizer.dist_fn", "manhattan"),
        ("quantizer.freeze", False),
        ("quantizer.combine_time_steps", 4),
        ("quantizer.feat_in", 40),
        ("encoder.subsampling", "striding"),
        ("encoder.causal_downsampling", True),
        ("encoder.feat_out", 32),
        ("encoder.self_attention_model", "abs_pos"),
        ("encoder.att_context_size", [70, 13]),
        ("encoder.att_context_style", "chunked_limited"),
        ("encoder.untie_biases", False),
        ("encoder.conv_norm_type", "group_norm8"),
        ("encoder.conv_context_size", "causal"),
        ("encoder.conv_context_size", [8, 0]),
        ("encoder.stochastic_depth_drop_prob", 0.1),
        ("encoder.reduction", "pooling"),
        ("decoder.num_classes", 64),
        ("decoder.num_decoders", 2),
        ("decoder.use_bias", False),
        ("loss.combine_time_steps", 1),
        ("optim.name", "novograd"),
        ("optim.sched.name", "CosineAnnealing"),
        ("optim.sched.d_model", 512),
        ("optim.sched.warmup_ratio", 0.1),
    ],
)
def test_nemo_field_that_is_not_implemented_is_refused_by_name(
    nemo_section: Mapping[str, Any], path: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{path}"):
        NestConfig.from_nemo(changed(nemo_section, path, value))


@pytest.mark.parametrize("path", ["encoder.d_model", "encoder.n_layers", "preprocessor.features", "quantizer.code_dim"])
def test_missing_nemo_field_is_named(nemo_section: Mapping[str, Any], path: str) -> None:
    section = changed(nemo_section, path, 0)
    parent, key = path.split(".")
    del section[parent][key]
    with pytest.raises(ConfigError, match=rf"model\.{path} is missing"):
        NestConfig.from_nemo(section)


def test_unresolved_nemo_interpolation_is_refused(nemo_section: Mapping[str, Any]) -> None:
    section = changed(nemo_section, "quantizer.num_books", "${model.num_books}")
    with pytest.raises(ConfigError, match=r"model\.quantizer\.num_books is '\$\{model\.num_books\}'"):
        NestConfig.from_nemo(section)


def test_missing_nemo_section_is_named(nemo_section: Mapping[str, Any]) -> None:
    section = {key: value for key, value in nemo_section.items() if key != "encoder"}
    with pytest.raises(ConfigError, match=r"model\.encoder is None: expected a section"):
        NestConfig.from_nemo(section)
