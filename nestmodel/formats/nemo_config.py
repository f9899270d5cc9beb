"""Translation of NeMo's configuration of a NEST model to ours and back.

This module knows the names and defaults of NeMo's `model` section. A field with a value that is not implemented here is
rejected, and so is an unknown field in a section that affects the computation, because it could change the results.

Source: numerics of NeMo 2.5 to 3.0, and of its pull request 15589 for NEST v2. A missing field has NeMo's own default.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_type_hints

from nestdata.config_checks import shown
from nestmodel.attention_context import UNLIMITED, Context
from nestmodel.config import (
    EncoderConfig,
    FeatureConfig,
    MaskConfig,
    NestConfig,
    OptimizerConfig,
    QuantizerConfig,
)
from nestmodel.config_files import check_size, convert
from nestmodel.errors import ConfigError


def config_from_nemo(section: Mapping[str, Any]) -> NestConfig:
    """Translates the `model` section of a NeMo configuration, interpolations resolved.

    Args:
        section: The section from which NeMo builds its EncDecDenoiseMaskedTokenPredModel. A missing field has NeMo's
            own default; a missing `optim` section gives the default optimizer. `quantizer.input_norm` is `frames` if
            the section is known to be of NEST v2, because no field tells which of its two norms was used.

    Raises:
        ConfigError: A field is missing, unknown, or has a value that is not implemented here; the message names it.
            Sections that do not affect the computation (data, spec_augment, which NEST never calls) are not read.

    Source: numerics of NeMo 2.5 to 3.0.
    """
    check_size(section, "model")
    model = _NemoSection(section, "model")
    position = model.take("mask_position", Literal["pre_conv", "post_conv"], "pre_conv")
    encoder = _nemo_encoder(model.child("encoder"))
    features = _nemo_features(model.child("preprocessor"))
    # If encoder frames are masked, a token is computed from one of them. NeMo then overwrites feat_in of the quantizer
    # and combine_time_steps of the loss, so either value is accepted.
    num_stacked = encoder.subsampling_factor if position == "pre_conv" else 1
    dims = {features.num_mels} if position == "pre_conv" else {features.num_mels, encoder.d_model}
    input_norm: Literal["frames"] | None = "frames" if is_nest_v2(section) else None
    quantizer = _nemo_quantizer(model.child("quantizer"), dims, num_stacked, input_norm)
    steps_combined = {num_stacked, encoder.subsampling_factor}
    _check_nemo_targets(model.child("decoder"), model.child("loss"), quantizer, steps_combined)
    return NestConfig(
        features=features,
        quantizer=quantizer,
        masking=_nemo_masking(model.child("masking"), model.child("loss"), position),
        encoder=encoder,
        optimizer=_nemo_optimizer(model.child("optim"), encoder.d_model) if "optim" in section else OptimizerConfig(),
    )


def is_nest_v2(section: Mapping[str, Any]) -> bool | None:
    """Returns whether the quantizer of a `model` section normalises its input; None if the section does not tell.

    With pull request 15589, NeMo always normalises the input and has no field for that. It can be told from a field
    that came with the pull request, or from the version that saved the section. A section without a version was not
    saved by NeMo.
    """
    quantizer = section.get("quantizer")
    fields = {*section, *(quantizer if isinstance(quantizer, Mapping) else ())}
    if not fields.isdisjoint(_V2_FIELDS):
        return True
    if "nemo_version" not in section:
        return False
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(.*)", str(section["nemo_version"]))
    if found is None:
        return None
    version, suffix = tuple(map(int, found.groups()[:3])), found[4]
    # No release up to 3.0.0 has the norm. Release candidates and branches, whose versions have a suffix, may have it
    # from 2.7 on.
    return False if version < (2, 7) or (version <= (3, 0, 0) and not suffix) else None


_V2_FIELDS = {"learnable_norm", "xavier_normal_init", "log_codebook_coverage"}
_MISSING = object()

_FIELDS: Mapping[type, Mapping[str, tuple[str, object]]] = {
    FeatureConfig: {
        "sampling_rate": ("sample_rate", 16000),
        "num_mels": ("features", _MISSING),
        "dither": ("dither", 1e-5),
        "pad_to": ("pad_to", 16),
        "preemphasis": ("preemph", 0.97),
    },
    EncoderConfig: {
        "d_model": ("d_model", _MISSING),
        "num_heads": ("n_heads", 4),
        "num_layers": ("n_layers", _MISSING),
        "subsampling_channels": ("subsampling_conv_channels", _MISSING),
        "subsampling_factor": ("subsampling_factor", 4),
        "ff_expansion": ("ff_expansion_factor", 4),
        "conv_kernel_size": ("conv_kernel_size", 31),
        "dropout": ("dropout", 0.1),
        "dropout_pre_encoder": ("dropout_pre_encoder", 0.1),
        "dropout_att": ("dropout_att", 0.0),
        "dropout_emb": ("dropout_emb", 0.1),
        "xscaling": ("xscaling", True),
        "use_bias": ("use_bias", True),
        "conv_norm": ("conv_norm_type", "batch_norm"),
        "att_context_style": ("att_context_style", "regular"),
        "causal_downsampling": ("causal_downsampling", False),
    },
    QuantizerConfig: {
        "num_classes": ("num_classes", _MISSING),
        "num_codebooks": ("num_books", _MISSING),
        "code_dim": ("code_dim", _MISSING),
        "distance": ("dist_fn", "cosine"),
    },
    MaskConfig: {"block_size": ("block_size", 48), "prob": ("mask_prob", 0.5)},
    OptimizerConfig: {"lr": ("lr", _MISSING), "betas": ("betas", (0.9, 0.999)), "weight_decay": ("weight_decay", 1e-2)},
}
"""Fields of our configurations whose values NeMo has under a name of its own: the name, and NeMo's default."""


class _NemoSection:
    """One section of a NeMo configuration, all of whose keys must be read."""

    def __init__(self, section: object, where: str) -> None:
        if not isinstance(section, Mapping):
            raise ConfigError(f"{where} is {shown(section)}: expected a section of a NeMo configuration.")
        self.where = where
        self.unread = dict(section)

    def child(self, key: str) -> "_NemoSection":
        """Returns a nested section."""
        return _NemoSection(self.unread.get(key), f"{self.where}.{key}")

    def take(self, key: str, hint: Any, default: object = _MISSING) -> Any:
        """Reads a value that has a field in our configuration; the default is NeMo's own."""
        value = self.unread.pop(key, default)
        if value is _MISSING:
            raise ConfigError(f"{self.where}.{key} is missing, and NeMo's default does not suit NEST: add it.")
        return convert(value, hint, f"{self.where}.{key}")

    def take_fields(self, config_class: type) -> dict[str, Any]:
        """Reads the values of `_FIELDS`, by the names of our fields."""
        hints = get_type_hints(config_class)
        return {name: self.take(key, hints[name], default) for name, (key, default) in _FIELDS[config_class].items()}

    def choose(self, key: str, *accepted: object, default: object) -> None:
        """Rejects all values except those for which this package computes the same as NeMo."""
        value = self.unread.pop(key, default)
        value = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        if value not in accepted:
            choices = " or ".join(repr(choice) for choice in accepted)
            raise ConfigError(f"{self.where}.{key} is {shown(value)}, which is not implemented: only {choices} is.")

    def only(self, **accepted: object) -> None:
        """Like `choose`, for keys whose only accepted value is NeMo's default."""
        for key, value in accepted.items():
            self.choose(key, value, default=value)

    def close(self, *without_effect: str) -> None:
        """Rejects unread keys, except those that do not affect the computation."""
        unknown = sorted(set(self.unread) - {"_target_", *without_effect})
        if unknown:
            raise ConfigError(f"{self.where}.{unknown[0]} is unknown to this version: remove it.")


def _nemo_features(section: _NemoSection) -> FeatureConfig:
    fields = section.take_fields(FeatureConfig)
    rate = fields["sampling_rate"]
    window_length = int(section.take("window_size", float) * rate)
    # In NeMo, null means the smallest power of two that holds the window.
    n_fft = section.unread.pop("n_fft", None) or 2 ** math.ceil(math.log2(window_length))
    # In NeMo, null and unknown names switch normalisation off; here only null and NA do.
    normalize = section.unread.pop("normalize", "per_feature") or "NA"
    section.only(window="hann", log=True, log_zero_guard_type="add", mel_norm="slaney")
    section.only(log_zero_guard_value=2**-24, mag_power=2.0, lowfreq=0, frame_splicing=1, nb_augmentation_prob=0.0)
    section.only(pad_value=0.0, exact_pad=False, stft_exact_pad=False, stft_conv=False)
    section.only(n_window_size=None, n_window_stride=None)
    section.choose("highfreq", None, rate // 2, default=None)
    features = FeatureConfig(
        n_fft=convert(n_fft, int, "model.preprocessor.n_fft"),
        window_length=window_length,
        hop_length=int(section.take("window_stride", float, 0.01) * rate),
        normalize=convert(normalize, Literal["per_feature", "NA"], "model.preprocessor.normalize"),
        **fields,
    )
    section.close("rng", "nb_max_freq", "use_torchaudio")
    return features


def _nemo_contexts(section: _NemoSection) -> tuple[Context, ...]:
    """Reads one pair, a list of pairs, or nothing, as NeMo does."""
    contexts = section.unread.pop("att_context_size", None) or [[UNLIMITED, UNLIMITED]]
    is_pair = isinstance(contexts, Sequence) and isinstance(contexts[0], int)
    found: tuple[Context, ...] = convert(
        [contexts] if is_pair else contexts, tuple[Context, ...], "model.encoder.att_context_size"
    )
    return found


def _nemo_conv_context(section: _NemoSection, kernel_size: int) -> Literal["causal"] | tuple[int, int] | None:
    hint = Literal["causal"] | tuple[int, int] | None
    found: Literal["causal"] | tuple[int, int] | None = section.take("conv_context_size", hint, None)
    half = (kernel_size - 1) // 2
    return None if found == (half, half) else found


def _nemo_encoder(section: _NemoSection) -> EncoderConfig:
    fields = section.take_fields(EncoderConfig)
    encoder = EncoderConfig(
        att_context_size=_nemo_contexts(section),
        att_context_probs=section.take("att_context_probs", tuple[float, ...] | None, None) or None,
        conv_context_size=_nemo_conv_context(section, fields["conv_kernel_size"]),
        **fields,
    )
    section.choose("subsampling", "dw_striding", default="striding")
    section.choose("feat_out", -1, encoder.d_model, default=-1)
    section.only(self_attention_model="rel_pos", untie_biases=True, global_tokens=0, reduction=None)
    section.only(att_chunk_context_size=None, conv_context_style="regular", stochastic_depth_drop_prob=0.0)
    section.close(
        *("feat_in", "pos_emb_max_len", "subsampling_conv_chunking_factor", "reduction_position", "reduction_factor"),
        *("stochastic_depth_mode", "stochastic_depth_start_layer", "global_tokens_spacing", "global_attn_separate"),
        *("use_pytorch_sdpa", "use_pytorch_sdpa_backends", "sync_max_audio_length"),
    )
    return encoder


def _nemo_quantizer(
    section: _NemoSection, dims: set[int], num_stacked: int, input_norm: Literal["frames"] | None
) -> QuantizerConfig:
    section.choose("combine_time_steps", num_stacked, default=1)
    section.choose("feat_in", *dims, default=min(dims))
    section.only(time_ahead=False, freeze=True, learnable_norm=False)
    quantizer = QuantizerConfig(input_norm=input_norm, **section.take_fields(QuantizerConfig))
    section.close("squeeze_single", "xavier_normal_init")
    return quantizer


def _nemo_masking(section: _NemoSection, loss: _NemoSection, position: Literal["pre_conv", "post_conv"]) -> MaskConfig:
    section.choose("allow_overlap", True, default=False)
    section.only(freeze=True, mask_value=None, max_mask_ratio=0.8)
    threshold = loss.take("mask_threshold", float, 0.8)
    masking = MaskConfig(position=position, threshold=threshold, **section.take_fields(MaskConfig))
    section.close("feat_in")
    return masking


def _check_nemo_targets(
    decoder: _NemoSection, loss: _NemoSection, books: QuantizerConfig, steps_combined: set[int]
) -> None:
    """Rejects a decoder or loss whose sizes differ from the quantizer's."""
    decoder.choose("num_classes", books.num_classes, default=None)
    decoder.choose("num_decoders", books.num_codebooks, default=1)
    decoder.choose("use_bias", True, default=False)
    decoder.close("feat_in", "squeeze_single", "init_mode")
    loss.choose("combine_time_steps", *sorted(steps_combined), default=1)
    loss.choose("num_decoders", books.num_codebooks, default=1)
    loss.close("squeeze_single", "mask_threshold")


def _nemo_optimizer(section: _NemoSection, d_model: int) -> OptimizerConfig:
    schedule = section.child("sched")
    section.choose("name", "adamw", default=None)
    name = schedule.take("name", Literal["NoamAnnealing", "CosineAnnealing"])
    if name == "NoamAnnealing":
        schedule.choose("d_model", d_model, default=None)
    schedule.only(warmup_ratio=None)
    return OptimizerConfig(
        schedule="noam" if name == "NoamAnnealing" else "cosine",
        **section.take_fields(OptimizerConfig),
        warmup_steps=schedule.take("warmup_steps", int),
        min_lr=schedule.take("min_lr", float, 0.0),
    )


_COLLECTION = "nemo.collections.asr."


def _fields_to_nemo(config: object) -> dict[str, Any]:
    """Returns the values of `_FIELDS` by NeMo's names."""
    return {key: getattr(config, name) for name, (key, _) in _FIELDS[type(config)].items()}


def config_to_nemo(config: NestConfig) -> dict[str, Any]:
    """Returns the `model` section of a NeMo configuration that builds the same model.

    The section is complete for NeMo's `restore_from`, and `config_from_nemo` reads it back. NeMo has no fields for
    `seed`, `encoder.checkpoint_activations`, `quantizer.normalize` and `masking.target_shift`, and no schedule `wsd`,
    so they are lost. If encoder frames are masked, the section has the values of NeMo's own YAML files: NeMo divides
    the block size, and overwrites other fields, when it builds the model. With `quantizer.input_norm`, a field of NEST
    v2 makes NeMo 3.0.0, which has no such norm, reject the file instead of building another model. A NeMo that opens
    the file applies its own norm.

    Source: NeMo 3.0.0.
    """
    factor, is_pre_conv = config.conformer.subsampling_factor, config.masking.position == "pre_conv"
    mels, books, classes = config.features.num_mels, config.quantizer.num_codebooks, config.quantizer.num_classes
    return {
        "target": _COLLECTION + "models.ssl_models.EncDecDenoiseMaskedTokenPredModel",
        "sample_rate": config.features.sampling_rate,
        "num_classes": classes,
        "num_books": books,
        "code_dim": config.quantizer.code_dim,
        "squeeze_single": False,
        "mask_position": config.masking.position,
        "train_ds": None,
        "validation_ds": None,
        "preprocessor": _features_to_nemo(config.features),
        # NEST never calls it, but NeMo requires it.
        "spec_augment": {"_target_": _COLLECTION + "modules.SpectrogramAugmentation", "freq_masks": 0, "time_masks": 0},
        "masking": {
            "_target_": _COLLECTION + "modules.RandomBlockMasking",
            **_fields_to_nemo(config.masking),
            "feat_in": mels,
            "freeze": True,
            "allow_overlap": True,
        },
        "quantizer": {
            "_target_": _COLLECTION + "modules.RandomProjectionVectorQuantizer",
            **_fields_to_nemo(config.quantizer),
            "feat_in": mels,
            "freeze": True,
            "squeeze_single": False,
            "combine_time_steps": factor if is_pre_conv else 1,
            **({} if config.quantizer.input_norm is None else {"learnable_norm": False}),
        },
        "encoder": _encoder_to_nemo(config.conformer, mels),
        "decoder": {
            "_target_": _COLLECTION + "modules.MultiSoftmaxDecoder",
            "feat_in": config.conformer.d_model,
            "num_classes": classes,
            "num_decoders": books,
            "squeeze_single": False,
            "use_bias": True,
        },
        "loss": {
            "_target_": _COLLECTION + "losses.MultiMLMLoss",
            # If encoder frames are masked, NeMo sets it to 1 when it divides the block size.
            "combine_time_steps": factor,
            "mask_threshold": config.masking.threshold,
            "num_decoders": books,
            "squeeze_single": False,
        },
        "optim": _optimizer_to_nemo(config.optimizer, config.conformer.d_model),
    }


def _features_to_nemo(features: FeatureConfig) -> dict[str, Any]:
    rate = features.sampling_rate
    return {
        "_target_": _COLLECTION + "modules.AudioToMelSpectrogramPreprocessor",
        **_fields_to_nemo(features),
        "normalize": features.normalize,
        "window_size": _seconds(features.window_length, rate),
        "window_stride": _seconds(features.hop_length, rate),
        "window": "hann",
        "n_fft": features.n_fft,
        "log": True,
        "frame_splicing": 1,
        "pad_value": 0.0,
    }


def _seconds(num_samples: int, rate: int) -> float:
    """Returns a duration that gives back num_samples when it is multiplied by the rate and truncated, as in NeMo."""
    seconds = num_samples / rate
    return seconds if int(seconds * rate) == num_samples else math.nextafter(seconds, math.inf)


def _exact_probs(probs: Sequence[float] | None) -> list[float] | None:
    """Returns probabilities with a sum of exactly 1, as NeMo requires; changes the last one if rounding prevents that.

    The sum of numbers s and 1 - s is rounded to 1 for every s in [0, 1].
    """
    if probs is None or sum(probs) == 1:
        return None if probs is None else list(probs)
    return [*probs[:-1], 1.0 - sum(probs[:-1])]


def _encoder_to_nemo(encoder: EncoderConfig, num_mels: int) -> dict[str, Any]:
    contexts = [list(context) for context in encoder.att_context_size]
    conv_context = encoder.conv_context_size
    return {
        "_target_": _COLLECTION + "modules.ConformerEncoder",
        **_fields_to_nemo(encoder),
        "feat_in": num_mels,
        "feat_out": -1,
        "subsampling": "dw_striding",
        "self_attention_model": "rel_pos",
        "att_context_size": contexts if len(contexts) > 1 else contexts[0],
        "att_context_probs": _exact_probs(encoder.att_context_probs),
        "untie_biases": True,
        "pos_emb_max_len": 5000,
        "conv_context_size": list(conv_context) if isinstance(conv_context, tuple) else conv_context,
    }


def _optimizer_to_nemo(optimizer: OptimizerConfig, d_model: int) -> dict[str, Any]:
    section = {"name": "adamw", **_fields_to_nemo(optimizer), "betas": list(optimizer.betas)}
    if optimizer.schedule == "wsd":  # NeMo has none
        return section
    schedule = {"warmup_steps": optimizer.warmup_steps, "warmup_ratio": None, "min_lr": optimizer.min_lr}
    if optimizer.schedule == "cosine":
        return section | {"sched": {"name": "CosineAnnealing"} | schedule}
    return section | {"sched": {"name": "NoamAnnealing", "d_model": d_model} | schedule}
