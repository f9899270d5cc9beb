"""The interface of encoders, and the construction of an encoder that settings name.

FastConformer and every encoder of another author are an `Encoder`. An encoder that was pretrained elsewhere has its own
features, and is a `FeatureEncoder`.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nestdata.class_path import build_object
from nestmodel.class_config import ClassConfig
from nestmodel.errors import ConfigError, is_out_of_memory
from nestmodel.nn.batch_norm import StepBatchNorm

_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
"""Norms whose running statistics follow the microbatches of one rank."""

_MAX_BORDER_FRAMES = 4
"""Frames by which numbers and lengths may differ from the sizes of an encoder, because of borders."""

_TRIED_FRAMES = 100
"""Frames of the audio for which the number of frames of an encoder with features of its own is checked."""


class EncoderOutput(NamedTuple):
    """Encoder frames of a batch."""

    frames: Float[Tensor, "batch enc_frames dim"]
    """Output of the last layer. Padded frames are meaningless."""

    lens: Int[Tensor, " batch"]
    """Number of valid encoder frames of each utterance."""


class HiddenStates(NamedTuple):
    """Encoder frames of a batch, at several depths of the encoder."""

    states: list[Float[Tensor, "batch enc_frames dim"]]
    """The input of the first layer, then the output of each layer: `num_layers` + 1 tensors."""

    lens: Int[Tensor, " batch"]
    """Number of valid encoder frames of each utterance."""


class Encoder(nn.Module):
    """Encodes log-mel frames as encoder frames.

    A subclass sets `dim` and `subsampling_factor`, and defines `forward`. What it draws in training has to come from
    torch's generators, which are seeded for every microbatch, so that a resume is exact. Its batch norms are replaced
    by `StepBatchNorm`; other buffers that change in training are taken from the first rank.
    """

    dim: int
    """Width of an encoder frame."""

    subsampling_factor: int
    """Number of feature frames per encoder frame."""

    num_layers: int = 0
    """Layers whose outputs `hidden_states` returns besides their input; 0 if it returns the last output alone."""

    is_checked: bool = False
    """Whether the lengths that the encoder returns have been compared with its sizes."""

    def forward(self, feats: Float[Tensor, "batch values frames"], feat_lens: Int[Tensor, " batch"]) -> EncoderOutput:
        """Encodes features, some of whose frames are masked in training.

        Args:
            feats: Log-mel frames, or frames of `FeatureEncoder.features`. Frames past the valid ones hold any values.
            feat_lens: Number of valid frames of each utterance.

        Returns:
            The encoder frames, whose number is frames / subsampling_factor up to rounding, and the number of valid ones
            of each utterance. A plain tuple is accepted as well.
        """
        raise NotImplementedError

    def hidden_states(
        self, feats: Float[Tensor, "batch values frames"], feat_lens: Int[Tensor, " batch"]
    ) -> HiddenStates:
        """Returns the outputs that `nestmodel features --layers` selects from; by default the last one alone."""
        frames, lens = self(feats, feat_lens)
        return HiddenStates([frames], lens)


class FeatureEncoder(Encoder):
    """An encoder that reads features of its own in place of log-mel frames.

    A subclass also sets `num_features` and `hop_length`, and defines `features` and `feature_lens`.
    """

    num_features: int
    """Values of a feature frame."""

    hop_length: int
    """Distance between feature frames, in samples at `features.sampling_rate`."""

    def features(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch values frames"], Int[Tensor, " batch"]]:
        """Returns the frames that are masked and then encoded, and the number of valid ones of each utterance.

        Args:
            audio: Samples, usually in [-1, 1], zero after their lengths.
            audio_lens: Number of samples of each utterance.
        """
        raise NotImplementedError

    def feature_lens(self, audio_lens: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Returns the numbers of frames that `features` gives for numbers of samples."""
        raise NotImplementedError


def build_encoder(config: ClassConfig) -> Encoder:
    """Returns an encoder of the class that settings name.

    Raises:
        ConfigError: There is no such class, it is not an `Encoder`, or it refuses its arguments.
    """
    if config.init_args is None:
        raise ConfigError(
            f"the encoder was given as an object of {config.class_path}, which is not stored. Give an equal one as the "
            "argument `encoder`, such as load_network(path, encoder=...), or name it by class_path and init_args."
        )
    # Settings may come with a model file of any origin: only a class derived from `Encoder` is called.
    encoder: Encoder = build_object(vars(config), "model.config.encoder", Encoder)
    return encoder


def adopt_encoder(encoder: object) -> None:
    """Prepares an encoder of another author for training, after a check of the sizes that it sets.

    It is put into train mode, because pretrained encoders are in eval mode. Its batch norms become `StepBatchNorm`.

    Raises:
        ConfigError: It is not an `Encoder`, its sizes are missing or wrong, or it has norms with statistics of one
            rank that cannot be replaced.
    """
    name = type(encoder).__name__
    if not isinstance(encoder, Encoder):
        what = f"the class {encoder.__name__}" if isinstance(encoder, type) else f"of type {name}"
        raise ConfigError(f"encoder is {what}: expected an object of a subclass of nestmodel.Encoder.")
    if encoder.num_layers > 0 and type(encoder).hidden_states is Encoder.hidden_states:
        raise ConfigError(
            f"{name}.num_layers is {encoder.num_layers}: define hidden_states, which returns their outputs."
        )
    own = ("num_features", "hop_length") if isinstance(encoder, FeatureEncoder) else ()
    for size in ("dim", "subsampling_factor", *own):
        value = getattr(encoder, size, None)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}.{size} is {value!r}: its __init__ must set it to a whole number, 1 or more.")
    halves = [path for path, parameter in encoder.named_parameters() if parameter.dtype != torch.float32]
    if halves:
        raise ConfigError(
            f"{name}.{halves[0]} is not in float32: call `float()` of the encoder, and set trainer.precision instead."
        )
    if isinstance(encoder, FeatureEncoder):
        num_frames = int(encoder.feature_lens(torch.tensor([_TRIED_FRAMES * encoder.hop_length])))
        if abs(num_frames - _TRIED_FRAMES) > _MAX_BORDER_FRAMES:
            raise ConfigError(
                f"{name}.feature_lens gives {num_frames} frames for {_TRIED_FRAMES} times its hop_length of "
                f"{encoder.hop_length} samples. Set hop_length to the number of samples from one frame to the next."
            )
    encoder.train()
    norms: dict[nn.Module, StepBatchNorm] = {}
    for path, module in list(encoder.named_modules(remove_duplicate=False)):
        if isinstance(module, _NORMS) and not isinstance(module, StepBatchNorm):
            if module not in norms:
                norms[module] = _step_norm(module, f"{name}.{path}")
            parent, _, last = path.rpartition(".")
            setattr(encoder.get_submodule(parent), last, norms[module])


def _step_norm(module: nn.Module, path: str) -> StepBatchNorm:
    """Returns a `StepBatchNorm` with the state of a norm of torch."""
    plain = nn.BatchNorm1d(1)
    settings = ("momentum", "affine", "track_running_stats")
    if type(module) is not nn.BatchNorm1d or any(getattr(module, each) != getattr(plain, each) for each in settings):
        raise ConfigError(
            f"{path} is {module}, whose statistics would be of one rank only. Use nn.BatchNorm1d with its defaults, or "
            "another norm."
        )
    norm = StepBatchNorm(module.num_features)
    norm.eps = module.eps
    norm.load_state_dict(module.state_dict())
    for own, given in zip(norm.parameters(), module.parameters(), strict=True):
        own.requires_grad_(given.requires_grad)
    return norm


@contextmanager
def naming_encoder(encoder: Encoder, method: str, given: Tensor) -> Iterator[None]:
    """Turns an error in a method of another author's encoder into a ConfigError with its method, input and line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or is_out_of_memory(error):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        called, text = f"{type(encoder).__name__}.{method}", " ".join(str(error).split())
        raise ConfigError(
            f"{called} fails for an input of shape {tuple(given.shape)}: {type(error).__name__}: {text} "
            f"({last.filename}, line {last.lineno})."
        ) from error


@contextmanager
def without_training(encoder: Encoder) -> Iterator[None]:
    """Puts an encoder into eval mode, and each of its modules back into its own mode at the end."""
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def check_output(encoder: Encoder, output: object, feat_lens: Int[Tensor, " batch"], num_feats: int) -> EncoderOutput:
    """Returns the output of an encoder of another author, after a check.

    The lengths are compared on a CPU and for the first batch only, because the CPU would have to wait for a GPU.

    Args:
        encoder: The encoder.
        output: What its `forward` returned.
        feat_lens: The lengths that it was called with.
        num_feats: Number of feature frames that it was called with.

    Raises:
        ConfigError: It is not a pair of (batch, enc_frames, dim) and lengths, or the numbers of frames or the lengths
            do not fit its subsampling factor.
    """
    name, factor = type(encoder).__name__, encoder.subsampling_factor
    is_pair = isinstance(output, tuple) and len(output) == 2 and all(isinstance(each, Tensor) for each in output)
    if not is_pair:
        raise ConfigError(f"{name}.forward returns {type(output).__name__}: expected (frames, lens), two tensors.")
    assert isinstance(output, tuple)
    frames, lens = output
    if frames.dim() != 3 or frames.shape[::2] != (len(feat_lens), encoder.dim):
        raise ConfigError(
            f"{name} returns frames of shape {tuple(frames.shape)}: expected ({len(feat_lens)}, enc_frames, dim "
            f"{encoder.dim})."
        )
    if lens.shape != feat_lens.shape or lens.is_floating_point():
        raise ConfigError(
            f"{name} returns lens {lens.dtype} of shape {tuple(lens.shape)}: expected whole numbers, one each."
        )
    lens = lens.to(frames.device, torch.int64)
    is_right = abs(frames.shape[1] - num_feats / factor) <= _MAX_BORDER_FRAMES
    if lens.device.type == "cpu" or not encoder.is_checked:
        differences = (lens - feat_lens.to(lens.device) / factor).abs()
        is_right = is_right and bool(differences.max() <= _MAX_BORDER_FRAMES) and bool(lens.max() <= frames.shape[1])
    encoder.is_checked = True
    if not is_right:
        raise ConfigError(
            f"{name} returns {frames.shape[1]} frames of lengths {lens.tolist()} for {num_feats} feature frames of "
            f"lengths {feat_lens.tolist()}, which its subsampling_factor {factor} does not give. Set the factor to its "
            "number of feature frames per encoder frame, and divide the lengths by it."
        )
    return EncoderOutput(frames, lens)
