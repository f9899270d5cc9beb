"""Settings of the NEST model: frozen dataclasses that check themselves, and the two ways to read them.

Owns the names, ranges and defaults of every setting of the model, and the strict reader of YAML mappings. Leaves the
trainer and the data to their own settings, and NeMo's configurations to `nemo`. Guarantees that each
value it returns is usable by the modules, and that no key it was given is silently dropped.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from nestmodel.errors import ConfigError

ConfigT = TypeVar("ConfigT")


def preset_path(name: str) -> Path:
    """Returns the YAML file of a preset that ships with the package.

    Raises:
        ConfigError: No preset has that name.
    """
    folder = Path(__file__).parent / "presets"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"{name!r} is neither a file nor a preset. The presets are {', '.join(known)}.")
    return folder / f"{name}.yaml"


def _require(ok: bool, field: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{field} is {value!r}: expected {expected}.")


def _at_least(low: int, section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value >= low, f"{section}.{name}", value, f"{low} or more")


def _share(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(0.0 <= value < 1.0, f"{section}.{name}", value, "a share in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """How audio becomes normalised log-mel frames."""

    sampling_rate: int = 16000
    """Samples per second of the audio, in Hz; the mel bins span 0 to half of it."""

    n_fft: int = 512
    """Length of the Fourier transform, in samples."""

    window_length: int = 400
    """Length of the Hann window, in samples, at most `n_fft`."""

    hop_length: int = 160
    """Samples from one frame to the next."""

    num_mels: int = 80
    """Number of mel bins."""

    dither: float = 1e-5
    """Standard deviation of the noise added to the audio in training; 0 adds none."""

    pad_to: int = 16
    """The number of frames is padded to a multiple of this."""

    preemphasis: float = 0.97
    """Share of the previous sample that is subtracted from each sample, in [0, 1)."""

    def __post_init__(self) -> None:
        _at_least(1, "features", self, "sampling_rate", "n_fft", "window_length", "hop_length", "num_mels", "pad_to")
        _at_least(0, "features", self, "dither")
        _share("features", self, "preemphasis")
        fits = self.window_length <= self.n_fft
        _require(fits, "features.window_length", self.window_length, f"at most n_fft ({self.n_fft}) samples")


@dataclass(frozen=True, kw_only=True)
class QuantizerConfig:
    """Size of the random-projection quantizer that makes the targets."""

    num_classes: int = 8192
    """Codes in each codebook."""

    num_codebooks: int = 1
    """Independent codebooks, hence tokens per encoder frame."""

    code_dim: int = 16
    """Length of a code."""

    distance: Literal["l2", "cosine"] = "l2"
    """What the nearest code is nearest by. Codes have a length of 1, so the two differ by rounding alone."""

    def __post_init__(self) -> None:
        _at_least(2, "quantizer", self, "num_classes")
        _at_least(1, "quantizer", self, "num_codebooks", "code_dim")


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Which frames the encoder does not see, and which tokens are scored for it."""

    position: Literal["pre_conv", "post_conv"] = "pre_conv"
    """Whether feature frames are masked, or encoder frames after the subsampling. Tokens are made of the same ones."""

    block_size: int = 40
    """Length of a masked block, in feature frames at either position."""

    prob: float = 0.01
    """Probability that a frame, or an encoder frame, starts a masked block, in [0, 1]."""

    threshold: float = 0.8
    """A token is scored when more than this share of its frames is masked, in [0, 1)."""

    def __post_init__(self) -> None:
        _at_least(1, "masking", self, "block_size")
        _require(0.0 <= self.prob <= 1.0, "masking.prob", self.prob, "a probability in [0, 1]")
        _share("masking", self, "threshold")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Size and regularisation of the FastConformer encoder."""

    d_model: int
    """Length of an encoder frame; even, and a multiple of `num_heads`."""

    num_heads: int
    """Attention heads of each layer."""

    num_layers: int
    """Conformer blocks."""

    subsampling_channels: int = 256
    """Channels of the subsampling convolutions."""

    subsampling_factor: int = 8
    """Frames per encoder frame; a power of two, 2 or more."""

    ff_expansion: int = 4
    """Hidden size of a feed-forward module, in multiples of `d_model`."""

    conv_kernel_size: int = 9
    """Encoder frames under the depthwise kernel; odd, so that it is centred."""

    dropout: float = 0.1
    """Dropout in and after each module of a block, in [0, 1)."""

    dropout_pre_encoder: float = 0.1
    """Dropout of the first block's input, in [0, 1)."""

    dropout_att: float = 0.1
    """Dropout of the attention weights, in [0, 1)."""

    dropout_emb: float = 0.0
    """Dropout of the relative position encodings, in [0, 1)."""

    xscaling: bool = True
    """Whether the first block's input is multiplied by the square root of `d_model`."""

    use_bias: bool = True
    """Whether feed-forward, attention and convolution modules have biases; the subsampling always has."""

    conv_norm: Literal["batch_norm", "layer_norm"] = "batch_norm"
    """Norm between the depthwise convolution and its Swish."""

    checkpoint_activations: bool = False
    """Whether a block keeps its input alone for the backward pass and computes the rest anew: less memory, a third more
    time, the same numbers."""

    def __post_init__(self) -> None:
        _at_least(1, "encoder", self, "num_heads", "num_layers", "subsampling_channels", "ff_expansion")
        _at_least(2, "encoder", self, "d_model", "subsampling_factor")
        _share("encoder", self, "dropout", "dropout_pre_encoder", "dropout_att", "dropout_emb")
        divides = self.d_model % 2 == 0 and self.d_model % self.num_heads == 0
        _require(divides, "encoder.d_model", self.d_model, f"an even multiple of num_heads ({self.num_heads})")
        factor = self.subsampling_factor
        _require(factor & (factor - 1) == 0, "encoder.subsampling_factor", factor, "a power of two")
        kernel = self.conv_kernel_size
        _require(kernel >= 1 and kernel % 2 == 1, "encoder.conv_kernel_size", kernel, "an odd number")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW under the Noam schedule."""

    lr: float = 5.0
    """Factor of the Noam schedule, not a learning rate: see `nestmodel.training.schedule.noam_lr`."""

    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of AdamW's two moments, each in [0, 1)."""

    weight_decay: float = 1e-3
    """Decoupled weight decay, 0 or more."""

    warmup_steps: int = 25000
    """Optimizer steps over which the learning rate rises."""

    min_lr: float = 1e-6
    """The learning rate does not fall below this after the warm-up."""

    max_skipped_steps: int = 10
    """Steps in a row that are skipped because their loss or gradients are no numbers, before the run is ended."""

    def __post_init__(self) -> None:
        _require(self.lr > 0.0, "optimizer.lr", self.lr, "a positive factor")
        _require(all(0.0 <= beta < 1.0 for beta in self.betas), "optimizer.betas", self.betas, "two rates in [0, 1)")
        _at_least(0, "optimizer", self, "weight_decay", "min_lr", "max_skipped_steps")
        _at_least(1, "optimizer", self, "warmup_steps")


@dataclass(frozen=True, kw_only=True)
class NestConfig:
    """Everything that defines a NEST model and its optimizer."""

    encoder: EncoderConfig
    """The FastConformer encoder."""

    features: FeatureConfig = FeatureConfig()
    """The log-mel front end."""

    quantizer: QuantizerConfig = QuantizerConfig()
    """The source of the targets."""

    masking: MaskConfig = MaskConfig()
    """The masks."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its schedule."""

    seed: int = 0
    """Key of all random draws of the model: initial weights, masks, dropout."""

    def __post_init__(self) -> None:
        # A token stacks as many frames as an encoder frame covers, so a partial stack would have no target.
        _require(
            self.features.pad_to % self.encoder.subsampling_factor == 0,
            "features.pad_to",
            self.features.pad_to,
            f"a multiple of encoder.subsampling_factor ({self.encoder.subsampling_factor})",
        )
        _require(
            self.masking.position == "pre_conv" or self.masking.block_size >= self.encoder.subsampling_factor,
            "masking.block_size",
            self.masking.block_size,
            f"one encoder frame ({self.encoder.subsampling_factor}) or more where masking.position is post_conv",
        )

    @classmethod
    def preset(cls, name: str) -> "NestConfig":
        """Reads the section `model.config` of a preset that ships with the package.

        Args:
            name: File name without ending, such as "demo" or "large".

        Raises:
            ConfigError: No preset has that name, or it holds an unknown key or a value out of range.
        """
        content = yaml.safe_load(preset_path(name).read_text(encoding="utf-8"))
        return cls.from_dict(content["model"]["config"])

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "NestConfig":
        """Builds a configuration from plain nested values, as `dataclasses.asdict` and YAML give them.

        Raises:
            ConfigError: A key is unknown or missing, or a value is of the wrong type or out of range.
        """
        return _build(cls, mapping, "model.config")


def _build(cls: type[ConfigT], mapping: object, where: str) -> ConfigT:
    """Turns a mapping into a dataclass, refusing unknown keys, missing keys and values of the wrong type."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where} is {mapping!r}: expected a mapping of the fields of {cls.__name__}.")
    hints = get_type_hints(cls)
    for key in mapping:
        if key not in hints:
            nearest = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{where}.{key} is unknown: did you mean {nearest!r}? Known are {', '.join(hints)}.")
    values = {key: convert(value, hints[key], f"{where}.{key}") for key, value in mapping.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{where} is incomplete: {error}.") from error


def convert(value: object, hint: Any, where: str) -> Any:
    """Checks a plain YAML value against an annotation; whole numbers serve as floats, lists as tuples."""
    if is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, where)
    if hint is float and type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]  # the line above leaves int or float
    if hint in (int, bool) and type(value) is hint:
        return value
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if get_origin(hint) is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        parts = get_args(hint)
        if len(parts) == len(value):
            return tuple(convert(part, part_hint, where) for part, part_hint in zip(value, parts, strict=True))
    # YAML 1.1 reads 1e-5 as text, which looks like a number to everyone else.
    advice = " Write numbers with a point, such as 1.0e-5." if isinstance(value, str) else ""
    if get_origin(hint) is Literal:
        raise ConfigError(f"{where} is {value!r}: expected {' or '.join(map(repr, get_args(hint)))}.")
    raise ConfigError(f"{where} is {value!r}: expected {getattr(hint, '__name__', hint)}.{advice}")
