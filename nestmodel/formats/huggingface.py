"""The encoder as a Hugging Face model: a directory that ParakeetEncoder and ParakeetFeatureExtractor open.

Owns the names that transformers has for the same weights and settings, and the list of what its class cannot hold.
Needs no transformers to write: the three files are JSON and safetensors. Guarantees, for what it does not refuse, the
same encoder frames in eval mode; dropout in training is placed a little differently there.

Source: transformers 5, models/parakeet.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError
from nestmodel.formats.safetensors import write_tensors

CONFIG_FILE = "config.json"
MODEL_TYPE = "parakeet_encoder"
_ENCODER = "encoder."
_RENAMED = {
    "pre_encode.conv.": "subsampling.layers.",
    "pre_encode.out.": "subsampling.linear.",
    "conv.batch_norm.": "conv.norm.",
    "self_attn.linear_q.": "self_attn.q_proj.",
    "self_attn.linear_k.": "self_attn.k_proj.",
    "self_attn.linear_v.": "self_attn.v_proj.",
    "self_attn.linear_out.": "self_attn.o_proj.",
    "self_attn.linear_pos.": "self_attn.relative_k_proj.",
    "self_attn.pos_bias_u": "self_attn.bias_u",
    "self_attn.pos_bias_v": "self_attn.bias_v",
}


def write_huggingface(directory: Path, config: NestConfig, state: Mapping[str, Tensor]) -> None:
    """Writes the encoder and its feature extractor into a directory, to be opened with `from_pretrained`.

    Raises:
        ConfigError: ParakeetEncoder cannot hold the model.
        OSError: It cannot be written.
    """
    check_huggingface(config)
    weights = {_renamed(n.removeprefix(_ENCODER)): value for n, value in state.items() if n.startswith(_ENCODER)}
    write_tensors(directory / "model.safetensors", weights, {})
    for name, content in ((CONFIG_FILE, _encoder(config)), ("preprocessor_config.json", _extractor(config))):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def check_huggingface(config: NestConfig) -> None:
    """Raises ConfigError where ParakeetEncoder or its feature extractor would compute something else."""
    encoder, features = config.encoder, config.features
    if encoder.conv_norm != "batch_norm":
        _refuse("encoder.conv_norm", encoder.conv_norm, "its convolution module has batch norm and nothing else")
    if features.num_mels % encoder.subsampling_factor != 0:
        factor = encoder.subsampling_factor
        _refuse(
            *("features.num_mels", features.num_mels),
            f"it rounds the number of subsampled bins down, so it needs a multiple of {factor}",
        )
    if features.n_fft % 2 != 0:
        _refuse("features.n_fft", features.n_fft, "its feature extractor counts frames for even ones")


def is_huggingface(directory: Path) -> bool:
    """Tells whether a directory holds what `write_huggingface` writes."""
    try:
        content = json.loads((directory / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, Mapping) and content.get("model_type") == MODEL_TYPE


def _refuse(field: str, value: object, why: str) -> None:
    raise ConfigError(
        f"{field} is {value!r}, and ParakeetEncoder of transformers cannot hold that: {why}. "
        "Export to safetensors, ONNX or NeMo instead."
    )


def _renamed(name: str) -> str:
    for ours, theirs in _RENAMED.items():
        name = name.replace(ours, theirs)
    return name


def _encoder(config: NestConfig) -> dict[str, Any]:
    encoder = config.encoder
    return {
        "architectures": ["ParakeetEncoder"],
        "model_type": MODEL_TYPE,
        "dtype": "float32",
        "hidden_size": encoder.d_model,
        "num_hidden_layers": encoder.num_layers,
        "num_attention_heads": encoder.num_heads,
        "intermediate_size": encoder.d_model * encoder.ff_expansion,
        "hidden_act": "silu",
        "attention_bias": encoder.use_bias,
        "convolution_bias": encoder.use_bias,
        "conv_kernel_size": encoder.conv_kernel_size,
        "subsampling_factor": encoder.subsampling_factor,
        "subsampling_conv_channels": encoder.subsampling_channels,
        "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
        "num_mel_bins": config.features.num_mels,
        "scale_input": encoder.xscaling,
        "dropout": encoder.dropout_pre_encoder,
        "dropout_positions": encoder.dropout_emb,
        "activation_dropout": encoder.dropout,
        "attention_dropout": encoder.dropout_att,
        "layerdrop": 0.0,  # transformers would drop a tenth of the layers in training
    }


def _extractor(config: NestConfig) -> dict[str, Any]:
    features = config.features
    return {
        "feature_extractor_type": "ParakeetFeatureExtractor",
        "feature_size": features.num_mels,
        "sampling_rate": features.sampling_rate,
        "hop_length": features.hop_length,
        "n_fft": features.n_fft,
        "win_length": features.window_length,
        "preemphasis": features.preemphasis,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": True,
    }
