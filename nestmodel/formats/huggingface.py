"""Export of the encoder as a Hugging Face model: a directory for an encoder and a feature extractor of transformers.

ParakeetEncoder is for whole utterances, and NemotronAsrStreamingEncoder for live speech. This module chooses the class,
translates names of weights and settings, and rejects models that neither class can hold. The three files are JSON and
safetensors, so transformers is not needed to write them. The exported encoder computes the same frames in eval mode; in
training, transformers applies dropout at slightly different points. The weights are read back under our names. Names in
the files begin as in a model with a head, so that both ParakeetForCTC and AutoModel open them.

Source: transformers 5.24, models/parakeet and models/nemotron_asr_streaming.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nestmodel.attention_context import is_streamable
from nestmodel.config import EncoderConfig, NestConfig
from nestmodel.errors import ConfigError
from nestmodel.formats.safetensors import CONFIG_KEY, write_tensors

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
EXTRACTOR_FILE = "preprocessor_config.json"
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

Mismatch = tuple[str, object, str]
"""A setting that a class cannot hold: its field, its value, and why."""


@dataclass(frozen=True)
class _Kind:
    """Classes of transformers that hold an encoder and its features."""

    model_type: str
    encoder: str
    extractor: str
    mismatches: Callable[[NestConfig], Iterator[Mismatch]]


def write_huggingface(directory: Path, config: NestConfig, state: Mapping[str, Tensor]) -> None:
    """Writes the encoder and its feature extractor into a directory, which can be opened with `from_pretrained`.

    Raises:
        ConfigError: transformers has no class that can hold the model.
        OSError: A file cannot be written.
    """
    kind = _kind_for(config)
    weights = {_renamed(name, _RENAMED.items()): value for name, value in state.items() if name.startswith(_PREFIX)}
    if kind is _NEMOTRON:
        weights = {_LAYER.sub(_stage_name, name): value for name, value in weights.items()}
    write_tensors(directory / WEIGHTS_FILE, weights, {CONFIG_KEY: json.dumps(asdict(config))})
    files = {CONFIG_FILE: _encoder_config(config, kind), EXTRACTOR_FILE: _extractor_config(config, kind)}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def is_huggingface(directory: Path) -> bool:
    """Returns whether a directory holds a model written by `write_huggingface`."""
    try:
        content = json.loads((directory / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, Mapping) and content.get("model_type") in [kind.model_type for kind in _KINDS]


def our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights of `write_huggingface` or of a model of transformers under our names; others are unchanged."""
    if not any(_RENAMED["pre_encode.out."] in name for name in state):
        return dict(state)
    layers = {_STAGE.sub(_layer_name, name): value for name, value in state.items()}
    back = [(theirs, ours) for ours, theirs in _RENAMED.items()]
    return {_PREFIX + _renamed(name.removeprefix(_PREFIX), back): value for name, value in layers.items()}


def _kind_for(config: NestConfig) -> _Kind:
    """Returns the classes that compute the same values as a model.

    Raises:
        ConfigError: No such classes exist. The message names the first mismatch of the classes with the fewest.
    """
    mismatches = {kind: list(kind.mismatches(config)) for kind in _KINDS}
    kind = min(_KINDS, key=lambda kind: len(mismatches[kind]))
    for field, value, why in mismatches[kind]:
        raise ConfigError(
            f"{field} is {value!r}, and {kind.encoder} of transformers cannot hold that: {why}. "
            "Export to safetensors, ONNX or NeMo instead."
        )
    return kind


def _parakeet_mismatches(config: NestConfig) -> Iterator[Mismatch]:
    encoder, features = config.conformer, config.features
    if encoder.conv_norm != "batch_norm":
        yield "encoder.conv_norm", encoder.conv_norm, "its convolution module has batch norm only"
    factor = encoder.subsampling_factor
    if features.num_mels % factor != 0:
        why = f"it rounds the number of subsampled bins down, so that a multiple of {factor} is needed"
        yield "features.num_mels", features.num_mels, why
    yield from _extractor_mismatches(config)
    unlimited = EncoderConfig.att_context_size
    if encoder.att_context_size != unlimited:
        yield "encoder.att_context_size", encoder.att_context_size, "it attends to whole utterances"
    if encoder.conv_context[0] != encoder.conv_context[1]:
        yield "encoder.conv_context_size", encoder.conv_context_size, "it convolves symmetrically"
    if encoder.causal_downsampling:
        yield "encoder.causal_downsampling", True, "its subsampling is not causal"
    if features.normalize != "per_feature":
        yield "features.normalize", features.normalize, "its feature extractor normalises each utterance"


def _nemotron_mismatches(config: NestConfig) -> Iterator[Mismatch]:
    encoder, features = config.conformer, config.features
    if encoder.conv_norm != "layer_norm":
        yield "encoder.conv_norm", encoder.conv_norm, "its convolution module has layer norm only"
    yield from _extractor_mismatches(config)
    contexts = encoder.att_context_size
    lefts = {left for left, _ in contexts}
    if len(lefts) > 1 or not all(is_streamable(context, encoder.att_context_style) for context in contexts):
        why = "it attends to chunks and to one limited number of frames before them; choose a context by --context"
        yield "encoder.att_context_size", contexts, why
    elif lefts == {0}:
        yield "encoder.att_context_size", contexts, "its cache never drops frames if the left context is 0"
    if encoder.conv_context[1] != 0:
        yield "encoder.conv_context_size", encoder.conv_context_size, "its convolutions are causal"
    if not encoder.causal_downsampling:
        yield "encoder.causal_downsampling", False, "its subsampling is causal"
    if features.normalize != "NA":
        yield "features.normalize", features.normalize, "its feature extractor does not normalise"


def _extractor_mismatches(config: NestConfig) -> Iterator[Mismatch]:
    n_fft = config.features.n_fft
    if n_fft % 2 != 0:
        yield "features.n_fft", n_fft, "its feature extractor counts frames correctly for even values only"


_PARAKEET = _Kind("parakeet_encoder", "ParakeetEncoder", "ParakeetFeatureExtractor", _parakeet_mismatches)
_NEMOTRON = _Kind(
    "nemotron_asr_streaming_encoder",
    "NemotronAsrStreamingEncoder",
    "NemotronAsrStreamingFeatureExtractor",
    _nemotron_mismatches,
)
_KINDS = _PARAKEET, _NEMOTRON


def _renamed(name: str, names: Iterable[tuple[str, str]]) -> str:
    for before, after in names:
        name = name.replace(before, after)
    return name


# NemotronAsrStreamingEncoder groups the layers that ParakeetEncoder counts: the first convolution is layer 0, and the
# depthwise and pointwise convolutions of stage i are the layers 3 i + 2 and 3 i + 3.
_LAYER = re.compile(r"subsampling\.layers\.(\d{1,4})\.")
_STAGE = re.compile(r"subsampling\.(?:conv_in|layers\.(\d{1,4})\.(depthwise|pointwise)_conv)\.")


def _stage_name(layer: re.Match[str]) -> str:
    number = int(layer[1])
    if number == 0:
        return "subsampling.conv_in."
    stage, is_pointwise = divmod(number - 2, 3)
    return f"subsampling.layers.{stage}.{'pointwise' if is_pointwise else 'depthwise'}_conv."


def _layer_name(stage: re.Match[str]) -> str:
    if stage[1] is None:
        return "subsampling.layers.0."
    return f"subsampling.layers.{3 * int(stage[1]) + (3 if stage[2] == 'pointwise' else 2)}."


def _encoder_config(config: NestConfig, kind: _Kind) -> dict[str, Any]:
    encoder = config.conformer
    left, right = encoder.att_context_size[0]
    return {
        "architectures": [kind.encoder],
        "model_type": kind.model_type,
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
        **({"sliding_window": left + 1, "default_num_lookahead_tokens": right} if kind is _NEMOTRON else {}),
    }


def _extractor_config(config: NestConfig, kind: _Kind) -> dict[str, Any]:
    features = config.features
    return {
        "feature_extractor_type": kind.extractor,
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
