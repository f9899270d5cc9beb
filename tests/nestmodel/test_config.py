from dataclasses import asdict, replace

import pytest

from nestmodel.config import EncoderConfig, NestConfig, OptimizerConfig
from nestmodel.errors import ConfigError


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


def test_preset_v2_changes_features_and_quantizer_of_any_size() -> None:
    small, config = NestConfig.preset("small"), NestConfig.preset("small", "v2")
    assert config == replace(
        small, features=replace(small.features, num_mels=128), quantizer=replace(small.quantizer, input_norm="frames")
    )
    live = NestConfig.preset("small", "v2", "streaming")
    assert live == NestConfig.preset("small", "streaming", "v2")
    assert live.quantizer == replace(config.quantizer, normalize="per_feature")


def test_unknown_preset_is_rejected_and_the_known_ones_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"'huge' is .*\. The presets are demo, large, medium, small, xlarge\. After"):
        NestConfig.preset("huge")


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("encoder", "num_layers", "2", "expected int"),
        ("encoder", "num_layers", True, "expected int"),
        ("optimizer", "min_lr", "1e-6", r"expected float. Write numbers with a point, such as 1\.0e-5"),
        ("optimizer", "betas", [0.9], "expected tuple"),
    ],
)
def test_value_of_the_wrong_type_is_rejected(section: str, key: str, value: object, message: str) -> None:
    values = asdict(NestConfig.preset("demo"))
    values[section][key] = value
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is .*{message}"):
        NestConfig.from_dict(values)


def test_integers_are_converted_to_floats() -> None:
    values = asdict(NestConfig.preset("demo"))
    values["optimizer"]["lr"] = 5
    lr = NestConfig.from_dict(values).optimizer.lr
    assert (type(lr), lr) == (float, 5.0)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("features", "sampling_rate", 0),
        ("features", "window_length", 513),
        ("features", "dither", -1e-5),
        ("features", "pad_to", 14),
        ("features", "preemphasis", 1.0),
        ("masking", "block_size", 0),
        ("encoder", "conv_norm", None),
        ("encoder", "d_model", 7),
        ("encoder", "d_model", 150),
        ("encoder", "subsampling_channels", 0),
        ("encoder", "conv_kernel_size", 8),
        ("encoder", "dropout_pre_encoder", -0.1),
        ("optimizer", "lr", 0.0),
        ("optimizer", "weight_decay", -1.0),
    ],
)
def test_value_out_of_range_is_rejected_by_name(section: str, key: str, value: object) -> None:
    values = asdict(NestConfig.preset("demo"))
    values[section][key] = value
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is .*: expected "):
        NestConfig.from_dict(values)


def test_masks_after_the_subsampling_are_at_least_one_frame_long() -> None:
    values = asdict(NestConfig.preset("demo"))
    values["masking"] |= {"position": "post_conv", "block_size": 3}
    with pytest.raises(ConfigError, match=r"masking\.block_size is 3: expected at least one encoder frame \(4\)"):
        NestConfig.from_dict(values)
