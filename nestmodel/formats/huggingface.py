"""Export of the encoder as a Hugging Face model: a directory for ParakeetEncoder and ParakeetFeatureExtractor.

This module translates names of weights and settings to those of transformers, and rejects models that its classes
cannot hold. The three files are JSON and safetensors, so transformers is not needed to write them. The exported encoder
computes the same frames in eval mode; in training, transformers applies dropout at slightly different points. The
weights are read back under our names.

Source: transformers 5, models/parakeet.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from nestmodel.config import EncoderConfig, NestConfig
from nestmodel.errors import ConfigError
from nestmodel.formats.safetensors import CONFIG_KEY, write_tensors

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_TYPE = "parakeet_encoder"
_PREFIX = "encoder."
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
    """Writes the encoder and its feature extractor into a directory, which can be opened with `from_pretrained`.

    Raises:
        ConfigError: ParakeetEncoder cannot hold the model.
        OSError: A file cannot be written.
    """
    check_huggingface(config)
    ours = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
    weights = {_renamed(name, _RENAMED.items()): value for name, value in ours.items()}
    write_tensors(directory / WEIGHTS_FILE, weights, {CONFIG_KEY: json.dumps(asdict(config))})
    files = {CONFIG_FILE: _encoder_config(config), "preprocessor_config.json": _extractor_config(config)}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def check_huggingface(config: NestConfig) -> None:
    """Raises ConfigError if ParakeetEncoder or its feature extractor would compute different values."""
    encoder, features = config.encoder, config.features
    if encoder.conv_norm != "batch_norm":
        _reject("encoder.conv_norm", encoder.conv_norm, "its convolution module has batch norm only")
    if features.num_mels % encoder.subsampling_factor != 0:
        factor = encoder.subsampling_factor
        _reject(
            *("features.num_mels", features.num_mels),
            f"it rounds the number of subsampled bins down, so it needs a multiple of {factor}",
        )
    if features.n_fft % 2 != 0:
        _reject("features.n_fft", features.n_fft, "its feature extractor counts frames correctly for even values only")
    unlimited = EncoderConfig.att_context_size
    if encoder.att_context_size != unlimited:
        _reject("encoder.att_context_size", encoder.att_context_size, "it attends to whole utterances")
    if encoder.conv_context[0] != encoder.conv_context[1]:
        _reject("encoder.conv_context_size", encoder.conv_context_size, "it convolves symmetrically")
    if encoder.causal_downsampling:
        _reject("encoder.causal_downsampling", True, "its subsampling is not causal")
    if features.normalize != "per_feature":
        _reject("features.normalize", features.normalize, "its feature extractor normalises each utterance")


def is_huggingface(directory: Path) -> bool:
    """Returns whether a directory holds a model written by `write_huggingface`."""
    try:
        content = json.loads((directory / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, Mapping) and content.get("model_type") == MODEL_TYPE


def our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights under our names; those of a file that `write_huggingface` has not written are unchanged."""
    if not any(name.startswith(_RENAMED["pre_encode.out."]) for name in state):
        return dict(state)
    back = [(theirs, ours) for ours, theirs in _RENAMED.items()]
    return {_PREFIX + _renamed(name, back): value for name, value in state.items()}


def _reject(field: str, value: object, why: str) -> None:
    raise ConfigError(
        f"{field} is {value!r}, and ParakeetEncoder of transformers cannot hold that: {why}. "
        "Export to safetensors, ONNX or NeMo instead."
    )


def _renamed(name: str, names: Iterable[tuple[str, str]]) -> str:
    for before, after in names:
        name = name.replace(before, after)
    return name


def _encoder_config(config: NestConfig) -> dict[str, Any]:
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


def _extractor_config(config: NestConfig) -> dict[str, Any]:
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
