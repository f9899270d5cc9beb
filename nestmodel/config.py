"""Settings of the NEST model: frozen dataclasses that validate themselves, read from presets or plain mappings.

This module defines the name, range and default of every setting of the model and its optimizer. Settings of the trainer
and of the data are defined elsewhere; `nestmodel.formats.nemo_config` translates NeMo's configurations. Every value is
validated on construction, and an unknown key raises an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from nestdata.config_checks import require, require_at_least, require_at_most, require_share
from nestdata.field_docs import with_field_docs
from nestmodel.attention_context import (
    UNLIMITED,
    Context,
    Style,
    check_contexts,
    format_context,
    is_pair_of_frames,
    is_streamable,
    look_ahead,
)
from nestmodel.class_config import ClassConfig
from nestmodel.config_files import build, check_size, preset_path, read_files
from nestmodel.errors import ConfigError

ExportFormat = Literal["nemo", "huggingface", "safetensors", "onnx", "onnx-streaming"]
"""File format of `export_model`."""

WeightParts = Literal["all", "encoder"]
"""Parts of a model whose weights are loaded or written."""

FeatureType = Literal["float32", "float16"]
"""Number type of extracted features."""

BackendName = Literal["auto", "torch"]
"""The setting `model.backend`, from which `choose_backend` makes a `Backend`."""

TrackerName = Literal["csv", "tensorboard", "wandb", "mlflow"]
"""Where `fit` logs metrics."""

_MAX_RATE = 0.1
"""Largest learning rate of AdamW that is not the factor of another schedule."""

_share = partial(require_share, below_one=True)


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """Computation of log-mel frames from audio."""

    sampling_rate: int = 16000
    """Sampling rate of the audio, in Hz; the mel bins span 0 Hz to half of it."""

    n_fft: int = 512
    """Length of the Fourier transform, in samples."""

    window_length: int = 400
    """Length of the Hann window, in samples, at most `n_fft`."""

    hop_length: int = 160
    """Distance between consecutive frames, in samples."""

    num_mels: int = 80
    """Number of mel bins."""

    dither: float = 1e-5
    """Standard deviation of the noise that is added to the audio in training; 0 adds none."""

    pad_to: int = 16
    """The number of frames is padded to a multiple of this."""

    preemphasis: float = 0.97
    """Factor of the previous sample, which is subtracted from each sample, in [0, 1)."""

    normalize: Literal["per_feature", "NA"] = "per_feature"
    """`per_feature` gives each mel bin zero mean and unit deviation over the utterance; `NA` leaves the log-mel frames
    as they are, so that a frame does not depend on later audio. Tokens are then computed from such frames as well, as
    in NeMo, unless `quantizer.normalize` is set: their mean dominates the projection, and few classes are used."""

    def __post_init__(self) -> None:
        require_at_least(
            1, "features", self, "sampling_rate", "n_fft", "window_length", "hop_length", "num_mels", "pad_to"
        )
        require_at_most(2**15, "features", self, "n_fft")  # a damaged file must not make a huge filterbank
        require_at_most(1024, "features", self, "num_mels")
        require_at_least(0, "features", self, "dither")
        _share("features", self, "preemphasis")
        fits = self.window_length <= self.n_fft
        require(fits, "features.window_length", self.window_length, f"at most n_fft ({self.n_fft}) samples")

    def num_padded_frames(self, num_samples: int) -> int:
        """Returns the number of frames that `LogMelFeatures.forward` returns for a batch, padding included."""
        num_frames = (num_samples - self.n_fft % 2) // self.hop_length + 1
        return num_frames + -num_frames % self.pad_to


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class QuantizerConfig:
    """Size of the random-projection quantizer that computes the target tokens."""

    num_classes: int = 8192
    """Number of codes in each codebook."""

    num_codebooks: int = 1
    """Number of independent codebooks, which is the number of tokens per encoder frame."""

    code_dim: int = 16
    """Dimension of a code."""

    distance: Literal["l2", "cosine"] = "l2"
    """Distance by which the nearest code is selected. Codes have norm 1, so the two differ only by rounding."""

    normalize: Literal["as_features", "per_feature"] = "as_features"
    """Normalisation of the feature frames that tokens are computed from: the same as for the features, as in NeMo; or
    `per_feature`, so that an encoder without normalised features learns the tokens of an encoder with them."""

    source: Literal["log_mels", "encoder"] = "log_mels"
    """Frames that tokens are computed from: log-mels, or the features of an encoder that brings its own."""

    input_norm: Literal["frames", "stacked"] | None = None
    """What is normalised to zero mean and unit deviation before the projection, as in NEST v2: `frames` normalises each
    frame before stacking; `stacked` the stacked frames of a token together; null nothing. The norm has no weights."""

    def __post_init__(self) -> None:
        require_at_least(2, "quantizer", self, "num_classes")
        require_at_least(1, "quantizer", self, "num_codebooks", "code_dim")


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Masking of frames, and the choice of the tokens that are scored."""

    position: Literal["pre_conv", "post_conv"] = "pre_conv"
    """Whether to mask feature frames (pre_conv) or encoder frames after the subsampling (post_conv). Tokens are
    computed from the same kind of frames."""

    block_size: int = 40
    """Length of a masked block, in feature frames for either position."""

    prob: float = 0.01
    """Probability that a frame starts a masked block (an encoder frame with post_conv), in [0, 1]."""

    threshold: float = 0.8
    """A token is scored when more than this share of its frames is masked, in [0, 1)."""

    target_shift: int = 0
    """Number of encoder frames after a token at which it is predicted. With `causal_downsampling`, an encoder frame
    reads only the first feature frame of its own token, and all feature frames of the token before."""

    def __post_init__(self) -> None:
        require_at_least(1, "masking", self, "block_size")
        require_at_most(2**15, "masking", self, "block_size")  # memory grows with it, also for a file of a model
        require_at_least(0, "masking", self, "target_shift")
        require(0.0 <= self.prob <= 1.0, "masking.prob", self.prob, "a probability in [0, 1]")
        _share("masking", self, "threshold")


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and regularisation of the FastConformer encoder."""

    d_model: int
    """Dimension of an encoder frame; even, and a multiple of `num_heads`."""

    num_heads: int
    """Number of attention heads of each block."""

    num_layers: int
    """Number of conformer blocks."""

    subsampling_channels: int = 256
    """Number of channels of the subsampling convolutions."""

    subsampling_factor: int = 8
    """Number of feature frames per encoder frame; a power of two, 2 or more."""

    ff_expansion: int = 4
    """Hidden size of a feed-forward module, in multiples of `d_model`."""

    conv_kernel_size: int = 9
    """Size of the depthwise kernel, in encoder frames; odd, so that the kernel is centred."""

    dropout: float = 0.1
    """Dropout probability in and after each module of a block, in [0, 1)."""

    dropout_pre_encoder: float = 0.1
    """Dropout probability of the first block's input, in [0, 1)."""

    dropout_att: float = 0.1
    """Dropout probability of the attention weights, in [0, 1)."""

    dropout_emb: float = 0.0
    """Dropout probability of the relative position encodings, in [0, 1)."""

    xscaling: bool = True
    """Whether to multiply the first block's input by the square root of `d_model`."""

    use_bias: bool = True
    """Whether feed-forward, attention and convolution modules have biases; the subsampling always has them."""

    conv_norm: Literal["batch_norm", "layer_norm"] = "batch_norm"
    """Norm between the depthwise convolution and its Swish activation."""

    att_context_size: tuple[Context, ...] = ((UNLIMITED, UNLIMITED),)
    """Pairs (left, right): the numbers of encoder frames that a frame attends to on each side, -1 for no limit. In
    training, one of several is drawn for each microbatch; validation uses each, features and the format `onnx` the
    first, `onnx-streaming` the first that can be streamed."""

    att_context_probs: tuple[float, ...] | None = None
    """Probability of each context in training; null makes them equal."""

    att_context_style: Style = "regular"
    """`regular`: the context counts from each frame. `chunked_limited`: a frame attends to its chunk of right + 1
    frames and to the chunks before it that make up the left context, a multiple of right + 1 frames."""

    conv_context_size: Literal["causal"] | tuple[int, int] | None = None
    """Frames to the left and to the right that the depthwise convolution reads, together `conv_kernel_size` - 1;
    `causal` reads none to the right; null reads equally many on both sides."""

    causal_downsampling: bool = False
    """Whether the subsampling reads no feature frame after the first one of an encoder frame. With masks
    before it, a batch then has one encoder frame more than tokens, which is cut off."""

    checkpoint_activations: bool = False
    """Whether blocks keep only their input for the backward pass and recompute the rest: less memory, a third more
    time, the same results."""

    def __post_init__(self) -> None:
        require_at_least(1, "encoder", self, "num_heads", "num_layers", "subsampling_channels", "ff_expansion")
        require_at_most(1000, "encoder", self, "num_layers")  # a damaged file must not make millions of modules
        require_at_least(2, "encoder", self, "d_model", "subsampling_factor")
        _share("encoder", self, "dropout", "dropout_pre_encoder", "dropout_att", "dropout_emb")
        divides = self.d_model % 2 == 0 and self.d_model % self.num_heads == 0
        require(divides, "encoder.d_model", self.d_model, f"an even multiple of num_heads ({self.num_heads})")
        factor = self.subsampling_factor
        require(factor & (factor - 1) == 0, "encoder.subsampling_factor", factor, "a power of two")
        kernel = self.conv_kernel_size
        require(kernel >= 1 and kernel % 2 == 1, "encoder.conv_kernel_size", kernel, "an odd number")
        check_contexts(self.att_context_size, self.att_context_probs, self.att_context_style)
        fits = is_pair_of_frames(self.conv_context) and sum(self.conv_context) == kernel - 1
        expected = f"causal, null, or (left, right) with left + right = conv_kernel_size - 1 ({kernel - 1})"
        require(fits, "encoder.conv_context_size", self.conv_context_size, expected)

    @property
    def conv_context(self) -> tuple[int, int]:
        """Frames to the left and to the right that the depthwise convolution reads."""
        if self.conv_context_size == "causal":
            return self.conv_kernel_size - 1, 0
        half = self.conv_kernel_size // 2
        return self.conv_context_size or (half, half)

    @property
    def is_limited(self) -> bool:
        """Whether attention has a limit in any of the contexts."""
        return self.att_context_size != ((UNLIMITED, UNLIMITED),)

    def with_context(self, context: Context) -> "EncoderConfig":
        """Returns the settings of the same encoder with one of its attention contexts.

        Args:
            context: One of `att_context_size`.

        Raises:
            ConfigError: The encoder has no such context.
        """
        if context not in self.att_context_size:
            known = "; ".join(map(format_context, self.att_context_size))
            raise ConfigError(
                f"model.config.encoder.att_context_size has no {format_context(context)}: choose one of {known}."
            )
        # Alone, a context without limits has no chunks.
        style = "regular" if context == (UNLIMITED, UNLIMITED) else self.att_context_style
        return replace(self, att_context_size=(context,), att_context_probs=None, att_context_style=style)


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    lr: float = 5.0
    """With the schedule `noam` a factor, not a rate; with the others the largest learning rate.

    With `noam`, the rate also depends on the width of the encoder: see `nestmodel.training.schedule.learning_rate`."""

    schedule: Literal["noam", "cosine", "wsd"] = "noam"
    """How the rate changes after the warm-up: `noam` as in NeMo; `cosine` down to `min_lr` at the last step; `wsd`
    constant, and then linearly down to `min_lr` at the last step."""

    decay_share: float = 0.2
    """With `wsd`: share of `trainer.max_steps` in which the rate falls, in (0, 1]."""

    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of AdamW's two moments, each in [0, 1)."""

    weight_decay: float = 1e-3
    """Decoupled weight decay, 0 or more."""

    warmup_steps: int = 25000
    """Optimizer steps in which the rate rises."""

    min_lr: float = 1e-6
    """Lower bound of the learning rate after the warm-up; with `cosine` and `wsd`, the rate of the last step."""

    max_skipped_steps: int = 10
    """Maximum number of consecutive steps skipped for a non-finite loss or gradient; one more ends the run."""

    def __post_init__(self) -> None:
        require(self.lr > 0.0, "optimizer.lr", self.lr, "a positive number")
        expected = f"a learning rate of at most {_MAX_RATE:g} with schedule {self.schedule}, such as 1e-3"
        require(self.schedule == "noam" or self.lr <= _MAX_RATE, "optimizer.lr", self.lr, expected)
        require(0.0 < self.decay_share <= 1.0, "optimizer.decay_share", self.decay_share, "a share in (0, 1]")
        require(all(0.0 <= beta < 1.0 for beta in self.betas), "optimizer.betas", self.betas, "two rates in [0, 1)")
        require_at_least(0, "optimizer", self, "weight_decay", "min_lr", "max_skipped_steps")
        require_at_least(1, "optimizer", self, "warmup_steps")

    @property
    def ends_with_run(self) -> bool:
        """Whether the rates depend on the number of steps of the run, which then cannot change."""
        return self.schedule != "noam"


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class NestConfig:
    """All settings of a NEST model and its optimizer."""

    encoder: EncoderConfig | ClassConfig
    """Sizes of the FastConformer encoder; or the `class_path` and `init_args` of another `nestmodel.Encoder`."""

    features: FeatureConfig = FeatureConfig()
    """The log-mel features."""

    quantizer: QuantizerConfig = QuantizerConfig()
    """The quantizer that computes the targets."""

    masking: MaskConfig = MaskConfig()
    """The masks."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its schedule."""

    seed: int = 0
    """Seed of all random numbers of the model: initial weights, masks, dropout."""

    def __post_init__(self) -> None:
        encoder, block_size, normalize = self.encoder, self.masking.block_size, self.quantizer.normalize
        is_pre_conv, is_as_features = self.masking.position == "pre_conv", normalize == "as_features"
        expected = "sizes, or a class_path; an object is the argument `encoder` of `fit` and of NestNetwork"
        require(isinstance(encoder, EncoderConfig | ClassConfig), "encoder", encoder, expected)
        fits = self.quantizer.source == "log_mels" or is_as_features
        require(fits, "quantizer.normalize", normalize, "as_features with quantizer.source encoder")
        if isinstance(encoder, ClassConfig):
            require(is_pre_conv, "masking.position", "post_conv", "pre_conv, unless the encoder is FastConformer")
            object.__setattr__(self, "encoder", encoder.plain("model.config.encoder"))
            return
        # A token stacks the feature frames of one encoder frame, so an incomplete stack would have no target.
        factor, pad_to = encoder.subsampling_factor, self.features.pad_to
        expected = f"a multiple of encoder.subsampling_factor ({factor})"
        require(pad_to % factor == 0, "features.pad_to", pad_to, expected)
        expected = f"at least one encoder frame ({factor}) with masking.position post_conv"
        require(is_pre_conv or block_size >= factor, "masking.block_size", block_size, expected)
        expected = "as_features with masking.position post_conv, whose tokens are computed after the subsampling"
        require(is_pre_conv or is_as_features, "quantizer.normalize", normalize, expected)

    @property
    def conformer(self) -> EncoderConfig:
        """The sizes of the FastConformer encoder.

        Raises:
            ConfigError: The encoder is of another class.
        """
        if isinstance(self.encoder, ClassConfig):
            raise not_conformer(self.encoder.class_path)
        return self.encoder

    @property
    def contexts(self) -> tuple[Context | None, ...]:
        """Attention contexts, each of which is validated; None alone for an encoder of another class."""
        return (None,) if isinstance(self.encoder, ClassConfig) else self.encoder.att_context_size

    @property
    def frame_s(self) -> float:
        """Seconds of audio from the start of one encoder frame of FastConformer to the start of the next."""
        return self.conformer.subsampling_factor * self.features.hop_length / self.features.sampling_rate

    def look_ahead_s(self, context: Context | None = None) -> float | None:
        """Returns the longest time from the start of an encoder frame to the end of the audio that it depends on.

        It is None if a frame depends on the whole utterance, for its attention or for the normalisation.

        Args:
            context: Attention context; by default the first of `att_context_size`.
        """
        encoder, features = self.conformer, self.features
        frames = look_ahead(
            context or encoder.att_context_size[0],
            encoder.att_context_style,
            num_layers=encoder.num_layers,
            conv_right=encoder.conv_context[1],
        )
        if frames is None or features.normalize == "per_feature":
            return None
        factor = encoder.subsampling_factor
        num_feature_frames = frames * factor + (0 if encoder.causal_downsampling else factor - 1)
        return (num_feature_frames * features.hop_length + features.window_length / 2) / features.sampling_rate

    def delay_s(self, context: Context | None = None) -> float | None:
        """Returns the time from the start of a chunk until `StreamingEncoder` returns it, without computing time.

        A chunk is complete with the last feature frame that its last encoder frame reads. This feature frame needs half
        a Fourier transform of audio after its centre; the look-ahead counts only half a window. The delay is None if
        the encoder cannot be streamed in this context.

        Args:
            context: Attention context; by default the first of `att_context_size`.
        """
        encoder, features = self.conformer, self.features
        context = context or encoder.att_context_size[0]
        is_causal = encoder.conv_context[1] == 0 and features.normalize == "NA"
        if not is_causal or not is_streamable(context, encoder.att_context_style):
            return None
        factor, (_, right) = encoder.subsampling_factor, context
        num_feature_frames = right * factor + (0 if encoder.causal_downsampling else factor - 1)
        # A feature frame is valid from its hop_length-th sample on, which matters if the transform is short.
        num_samples = max(features.n_fft - features.n_fft // 2, features.hop_length)
        return (num_feature_frames * features.hop_length + num_samples) / features.sampling_rate

    def describe_contexts(self) -> str:
        """Returns the attention contexts with look-ahead and delay as text.

        For example `70,13: 1.05 s, delay 1.06 s; -1,-1: the whole utterance`; a context that cannot be streamed has no
        delay.
        """
        texts = []
        for context in self.conformer.att_context_size:
            look_ahead_s, delay_s = self.look_ahead_s(context), self.delay_s(context)
            shown = "the whole utterance" if look_ahead_s is None else f"{look_ahead_s:.3g} s"
            shown += "" if delay_s is None else f", delay {delay_s:.3g} s"
            texts.append(f"{format_context(context)}: {shown}")
        return "; ".join(texts)

    @classmethod
    def preset(cls, *names: str) -> "NestConfig":
        """Reads the section `model.config` of presets of the package.

        Args:
            *names: File names without suffix, such as "demo" or "large". The values of a second preset, such as
                "streaming", replace values of the first.

        Raises:
            ConfigError: No preset has that name, or the first one is not a whole model.
        """
        require(len(names) > 0, "names", names, "the name of a preset, such as large")
        return cls.from_dict(read_files(map(preset_path, names))["model"]["config"])

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "NestConfig":
        """Builds a configuration from plain nested values, such as the result of `dataclasses.asdict` or of YAML.

        Raises:
            ConfigError: A key is unknown or missing, or a value has the wrong type or is out of range.
        """
        check_size(mapping, "model.config")
        return build(cls, mapping, "model.config")


def not_conformer(class_path: str) -> ConfigError:
    """Returns the error for a function that only FastConformer has, given the class of another encoder."""
    return ConfigError(
        f"model.config.encoder is of the class {class_path}, and this is for the FastConformer encoder of this package "
        "only: attention contexts, streaming, windows of long audio, and the formats nemo, huggingface and onnx. "
        "safetensors can hold the model."
    )
