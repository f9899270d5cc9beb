import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestmodel import (
    ConfigError,
    EncoderConfig,
    FeatureConfig,
    MaskConfig,
    NestConfig,
    OptimizerConfig,
    QuantizerConfig,
    config_from_nemo,
)
from nestmodel.formats.nemo_config import config_to_nemo, is_nest_v2

GOLDEN = Path(__file__).parents[2] / "golden" / "nemo_tiny.npz"


@pytest.fixture(scope="module")
def nemo_section() -> Mapping[str, Any]:
    with np.load(GOLDEN) as arrays:
        section: Mapping[str, Any] = json.loads(str(arrays["config"]))
    return section


def changed(section: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """Returns a copy of a NeMo section with one field changed, such as encoder.d_model."""
    copied = copy.deepcopy(dict(section))
    *parents, key = path.split(".")
    target = copied
    for parent in parents:
        target = target[parent]
    target[key] = value
    return copied


def test_section_is_translated_to_a_config(nemo_section: Mapping[str, Any]) -> None:
    config = config_from_nemo(nemo_section)
    assert config.features == FeatureConfig(dither=0.0)
    assert config.quantizer == QuantizerConfig(num_classes=128)
    assert config.masking == MaskConfig()
    assert config.encoder == EncoderConfig(d_model=64, num_heads=4, num_layers=2, subsampling_channels=32)
    assert config.optimizer == OptimizerConfig()


def test_variants_are_translated_to_settings(nemo_section: Mapping[str, Any]) -> None:
    section = changed(nemo_section, "quantizer.dist_fn", "cosine")
    section = changed(section, "encoder.conv_norm_type", "layer_norm")
    config = config_from_nemo(section)
    assert (config.quantizer.distance, config.encoder.conv_norm) == ("cosine", "layer_norm")


@pytest.mark.parametrize("path", ["quantizer.learnable_norm", "quantizer.xavier_normal_init", "log_codebook_coverage"])
def test_a_field_of_nest_v2_tells_that_the_quantizer_normalises_its_input(
    nemo_section: Mapping[str, Any], path: str
) -> None:
    config = config_from_nemo(changed(nemo_section, path, False))
    assert config.quantizer == QuantizerConfig(num_classes=128, input_norm="frames")
    assert config_from_nemo(config_to_nemo(config)) == config


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.0.0rc1", False),  # those of files that NVIDIA has released
        ("2.2.0rc0", False),
        ("2.7.3", False),
        ("3.0.0", False),
        ("2.8.0rc0", None),
        ("3.0.0+5d1bc1a", None),
        ("3.1.0", None),
        ("main", None),
    ],
)
def test_a_version_before_nest_v2_tells_that_a_model_is_not(
    nemo_section: Mapping[str, Any], version: str, expected: bool | None
) -> None:
    section = changed(nemo_section, "nemo_version", version)
    assert is_nest_v2(section) is expected
    assert config_from_nemo(section).quantizer.input_norm is None


@pytest.mark.parametrize(("feat_in", "steps_combined"), [(80, 8), (64, 1)])
def test_fields_that_nemo_overwrites_after_the_subsampling_may_have_either_value(
    nemo_section: Mapping[str, Any], feat_in: int, steps_combined: int
) -> None:
    section = changed(nemo_section, "mask_position", "post_conv")
    section = changed(section, "loss.combine_time_steps", steps_combined)
    section = changed(section, "quantizer.feat_in", feat_in)
    with pytest.raises(ConfigError, match=r"model\.quantizer\.combine_time_steps is 8, .* only 1 is"):
        config_from_nemo(section)
    config = config_from_nemo(changed(section, "quantizer.combine_time_steps", 1))
    assert config.masking == MaskConfig(position="post_conv")


def test_section_without_optimizer_gives_the_default_one(nemo_section: Mapping[str, Any]) -> None:
    section = {key: value for key, value in nemo_section.items() if key != "optim"}
    assert config_from_nemo(section).optimizer == OptimizerConfig()


def test_n_fft_of_null_is_the_next_power_of_two(nemo_section: Mapping[str, Any]) -> None:
    assert config_from_nemo(changed(nemo_section, "preprocessor.n_fft", None)).features.n_fft == 512


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mask_position", "post_norm"),
        ("preprocessor.normalize", "all_features"),
        ("preprocessor.window", "hamming"),
        ("preprocessor.new_field", 1),
        ("masking.allow_overlap", False),
        ("quantizer.dist_fn", "manhattan"),
        ("quantizer.combine_time_steps", 4),
        ("quantizer.learnable_norm", True),
        ("encoder.subsampling", "striding"),
        ("encoder.att_context_size", [70]),
        ("encoder.att_context_probs", "uniform"),
        ("encoder.conv_norm_type", "group_norm8"),
        ("decoder.num_classes", 64),
        ("decoder.use_bias", False),
        ("optim.name", "novograd"),
        ("optim.sched.name", "InverseSquareRootAnnealing"),
        ("optim.sched.warmup_ratio", 0.1),
    ],
)
def test_field_that_is_not_implemented_is_rejected_by_name(
    nemo_section: Mapping[str, Any], path: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{path}"):
        config_from_nemo(changed(nemo_section, path, value))


@pytest.mark.parametrize(
    ("nemo", "ours"),
    [
        ({}, {}),
        ({"att_context_size": None, "att_context_probs": None, "conv_context_size": [4, 4]}, {}),
        ({"att_context_size": [[-1, -1]], "att_context_probs": []}, {}),
        ({"att_context_size": [70, 13]}, {"att_context_size": ((70, 13),)}),
        (
            {"att_context_size": [70, 13], "att_context_style": "chunked_limited", "conv_context_size": "causal"},
            {
                "att_context_size": ((70, 13),),
                "att_context_style": "chunked_limited",
                "conv_context_size": "causal",
            },
        ),
        (
            {"att_context_size": [[70, 13], [70, 0]], "att_context_probs": [0.25, 0.75]},
            {"att_context_size": ((70, 13), (70, 0)), "att_context_probs": (0.25, 0.75)},
        ),
        ({"conv_context_size": [8, 0]}, {"conv_context_size": (8, 0)}),
        ({"causal_downsampling": True}, {"causal_downsampling": True}),
    ],
)
def test_contexts_are_translated_in_both_directions(
    nemo_section: Mapping[str, Any], nemo: Mapping[str, object], ours: Mapping[str, Any]
) -> None:
    section = dict(nemo_section)
    for name, value in nemo.items():
        section = changed(section, f"encoder.{name}", value)
    config = config_from_nemo(section)
    default = EncoderConfig(d_model=64, num_heads=4, num_layers=2, subsampling_channels=32)
    assert config.encoder == replace(default, **ours)
    assert config_from_nemo(config_to_nemo(config)) == config


@pytest.mark.parametrize("probs", [(0.7, 0.2, 0.1), (1 / 3, 1 / 3, 1 / 3)])
def test_exported_probabilities_have_the_exact_sum_that_nemo_demands(probs: tuple[float, ...]) -> None:
    encoder = EncoderConfig(
        d_model=64, num_heads=4, num_layers=2, att_context_size=((8, 2), (8, 1), (8, 0)), att_context_probs=probs
    )
    found = config_to_nemo(NestConfig(encoder=encoder))["encoder"]["att_context_probs"]
    assert sum(found) == 1
    assert found == pytest.approx(probs, rel=0, abs=1e-15)


@pytest.mark.parametrize(
    ("nemo", "ours"), [("per_feature", "per_feature"), ("NA", "NA"), (None, "NA"), (False, "NA"), ("", "NA")]
)
def test_normalisation_of_features_is_translated(nemo_section: Mapping[str, Any], nemo: object, ours: str) -> None:
    config = config_from_nemo(changed(nemo_section, "preprocessor.normalize", nemo))
    assert config.features.normalize == ours
    assert config_to_nemo(config)["preprocessor"]["normalize"] == ours


@pytest.mark.parametrize("path", ["encoder.n_layers", "preprocessor.features"])
def test_missing_field_is_named(nemo_section: Mapping[str, Any], path: str) -> None:
    section = changed(nemo_section, path, 0)
    parent, key = path.split(".")
    del section[parent][key]
    with pytest.raises(ConfigError, match=rf"model\.{path} is missing"):
        config_from_nemo(section)


def test_window_and_hop_lengths_are_exact_after_conversion_to_seconds(nemo_section: Mapping[str, Any]) -> None:
    config = config_from_nemo(nemo_section)
    for rate in (8000, 16000, 22050, 44100):
        for length in range(1, 500):
            features = FeatureConfig(sampling_rate=rate, window_length=length, hop_length=length)
            section = config_to_nemo(replace(config, features=features))["preprocessor"]
            assert int(section["window_size"] * rate) == length
            assert int(section["window_stride"] * rate) == length
