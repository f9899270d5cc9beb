"""What an encoder has to offer, and the construction of one that settings name.

FastConformer and every encoder of another author are an `Encoder`. One that was pretrained elsewhere brings its own
features, and is a `FeatureEncoder`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nestdata.class_path import build_object
from nestmodel.class_config import ClassConfig
from nestmodel.errors import ConfigError
from nestmodel.nn.batch_norm import StepBatchNorm

_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
"""Norms whose running statistics follow the microbatches of one rank."""

_MAX_MORE, _MAX_SHARE = 2, 0.05
"""By how many frames, and by which share of them, the output of an encoder may differ from its factor: borders."""


class EncoderOutput(NamedTuple):
    """Encoder frames of a batch."""

    frames: Float[Tensor, "batch enc_frames dim"]
    """Output of the last layer. Padded frames are meaningless."""

    lens: Int[Tensor, " batch"]
    """Number of valid encoder frames of each utterance."""


class HiddenStates(NamedTuple):
    """Encoder frames of a batch, at several depths of the encoder."""

    states: list[Float[Tensor, "batch enc_frames dim"]]
    """`num_layers` + 1 of them: the input of the first layer, then the output of each layer."""

    lens: Int[Tensor, " batch"]
    """Number of valid encoder frames of each utterance."""


class Encoder(nn.Module):
    """Encodes log-mel frames as encoder frames.

    A subclass sets `dim` and `subsampling_factor`, and defines `forward`. What it draws in training has to come from
    torch's generators, which are seeded for every microbatch, so that a resume is exact. Its batch norm becomes that of
    whole steps; other buffers that change in training are those of the first rank.
    """

    dim: int
    """Width of an encoder frame."""

    subsampling_factor: int
    """Number of feature frames per encoder frame."""

    num_layers: int = 0
    """Layers whose outputs `hidden_states` returns besides their input; 0 if it returns the last output alone."""

    def forward(self, feats: Float[Tensor, "batch values frames"], feat_lens: Int[Tensor, " batch"]) -> EncoderOutput:
        """Encodes features, some of whose frames are masked in training.

        Args:
            feats: Log-mel frames, or those of `FeatureEncoder.features`. Frames past the valid ones hold any values.
            feat_lens: Number of valid frames of each utterance.

        Returns:
            The encoder frames, frames / subsampling_factor of them up to rounding, and the number of valid ones of each
            utterance; also as a plain tuple.
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
        ConfigError: There is no such class, it is no `Encoder`, or it refuses its arguments.
    """
    if config.init_args is None:
        raise ConfigError(
            f"the encoder was given as an object of {config.class_path}, which is not stored. Give an equal one as the "
            "argument `encoder`, such as load_network(path, encoder=...), or name it by class_path and init_args."
        )
    # Settings may come with a model file of anybody: no class but an encoder is called.
    encoder: Encoder = build_object(vars(config), "model.config.encoder", Encoder)
    return encoder


def adopt_encoder(encoder: object) -> None:
    """Prepares an encoder of another author for training, after a check of the sizes that it sets.

    It is put into train mode, which pretrained ones are not in, and its batch norm becomes that of whole steps.

    Raises:
        ConfigError: It is no `Encoder`, has no such sizes, or has norms whose statistics would be those of one rank.
    """
    name = type(encoder).__name__
    if not isinstance(encoder, Encoder):
        raise ConfigError(f"encoder is of type {name}: expected an object of a subclass of nestmodel.Encoder.")
    own = ("num_features", "hop_length") if isinstance(encoder, FeatureEncoder) else ()
    for size in ("dim", "subsampling_factor", *own):
        value = getattr(encoder, size, None)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}.{size} is {value!r}: its __init__ must set it to a whole number, 1 or more.")
    encoder.train()
    for path, module in list(encoder.named_modules()):
        if isinstance(module, _NORMS) and not isinstance(module, StepBatchNorm):
            if type(module) is not nn.BatchNorm1d or module.momentum != nn.BatchNorm1d(1).momentum or not module.affine:
                raise ConfigError(
                    f"{name}.{path} is {module}: its statistics would be those of one rank. Use nn.BatchNorm1d with "
                    "its default momentum, or another norm."
                )
            norm = StepBatchNorm(module.num_features)
            norm.eps = module.eps
            norm.load_state_dict(module.state_dict())
            parent, _, last = path.rpartition(".")
            setattr(encoder.get_submodule(parent), last, norm)


def check_output(encoder: Encoder, output: tuple[Tensor, Tensor], num_tokens: int) -> EncoderOutput:
    """Returns the output of an encoder of another author, after a check of its shape.

    Raises:
        ConfigError: It is not (batch, enc_frames, dim), or its number of frames is not that of its subsampling factor.
    """
    frames, lens = output
    name = type(encoder).__name__
    if frames.dim() != 3 or frames.shape[2] != encoder.dim or frames.shape[0] != lens.shape[0]:
        raise ConfigError(
            f"{name} returns frames of shape {tuple(frames.shape)}: expected ({lens.shape[0]}, enc_frames, dim "
            f"{encoder.dim})."
        )
    if abs(frames.shape[1] - num_tokens) > _MAX_MORE + _MAX_SHARE * num_tokens:
        raise ConfigError(
            f"{name} returns {frames.shape[1]} frames where its subsampling_factor {encoder.subsampling_factor} gives "
            f"{num_tokens}. Set the factor to its number of feature frames per encoder frame."
        )
    return EncoderOutput(frames, lens.to(frames.device, torch.int64))
