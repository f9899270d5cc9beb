"""Encoders of another author, which settings name by `tests.own_encoders.CLASS`."""

import random

import numpy as np
import torch
from torch import Tensor, nn

from nestmodel import Encoder, EncoderOutput, FeatureConfig, FeatureEncoder, HiddenStates
from nestmodel.nn.features import LogMelFeatures


class Convolutions(Encoder):
    """Reads log-mels, with dropout and torch's batch norm."""

    def __init__(self, dim: int = 16, factor: int = 4, num_mels: int = 80) -> None:
        super().__init__()
        self.dim, self.subsampling_factor = dim, factor
        self.convolution = nn.Conv1d(num_mels, dim, factor, stride=factor)
        self.norm, self.dropout = nn.BatchNorm1d(dim), nn.Dropout(0.2)
        self.last = nn.Linear(dim, dim)

    def forward(self, feats: Tensor, feat_lens: Tensor) -> EncoderOutput:
        """Returns one frame for `factor` feature frames."""
        frames = self.dropout(self.norm(self.convolution(feats))).transpose(1, 2)
        return EncoderOutput(self.last(frames.relu()), feat_lens // self.subsampling_factor)


class Waveform(FeatureEncoder):
    """Reads frames of samples, which it learns itself: one every 20 ms, a few less than there are pairs of log-mels."""

    num_features, hop_length, subsampling_factor = 12, 320, 2

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.dim = dim
        self.frames = nn.Conv1d(1, self.num_features, 400, stride=320)
        self.pairs = nn.Conv1d(self.num_features, dim, 2, stride=2)
        self.last = nn.Linear(dim, dim)

    def feature_lens(self, audio_lens: Tensor) -> Tensor:
        """Returns the number of windows of 25 ms."""
        return ((audio_lens - 400) // 320 + 1).clamp(min=0)

    def features(self, audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the frames of the first convolution."""
        return self.frames(audio.unsqueeze(1)), self.feature_lens(audio_lens)

    def forward(self, feats: Tensor, feat_lens: Tensor) -> EncoderOutput:
        """Returns a frame for each pair of frames."""
        return EncoderOutput(self.last(self.pairs(feats).transpose(1, 2).relu()), feat_lens // 2)


class OwnMels(FeatureEncoder):
    """Brings the log-mels of this package as features of its own."""

    def __init__(self, factor: int = 8) -> None:
        super().__init__()
        self.num_features, self.hop_length = 80, 160
        self.dim, self.subsampling_factor = 16, factor
        self.log_mels = LogMelFeatures(FeatureConfig(dither=0.0))
        self.convolution = nn.Conv1d(80, 16, factor, stride=factor)

    def feature_lens(self, audio_lens: Tensor) -> Tensor:
        """Returns the number of valid log-mel frames."""
        return audio_lens // 160

    def features(self, audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-mels, without the padding at the end."""
        feats, lens = self.log_mels(audio, audio_lens)
        return feats[:, :, : audio.shape[1] // 160], lens

    def forward(self, feats: Tensor, feat_lens: Tensor) -> EncoderOutput:
        """Returns one frame for `factor` feature frames."""
        frames = self.convolution(nn.functional.pad(feats, (0, -feats.shape[2] % self.subsampling_factor)))
        return EncoderOutput(frames.transpose(1, 2), -(-feat_lens // self.subsampling_factor))


class Declared(Convolutions):
    """Declares other sizes than it has."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            setattr(self, name, size)


class WithoutWidth(Encoder):
    """Does not say how wide its frames are."""

    def __init__(self) -> None:
        super().__init__()
        self.subsampling_factor = 4


class ImageNorm(Convolutions):
    """Has a batch norm whose statistics are those of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(16)


class FromElsewhere(Convolutions):
    """Is in eval mode after its construction, as models of `from_pretrained` are."""

    def __init__(self) -> None:
        super().__init__()
        self.eval()
        torch.nn.init.ones_(self.last.bias)


class WrongLens(Convolutions):
    """Returns the lengths of its input."""

    def forward(self, feats: Tensor, feat_lens: Tensor) -> EncoderOutput:
        """Returns frames of another length than their number says."""
        frames, _ = super().forward(feats, feat_lens)
        return EncoderOutput(frames, feat_lens)


class OneTensor(Convolutions):
    """Returns frames alone."""

    def forward(self, feats: Tensor, feat_lens: Tensor) -> Tensor:  # type: ignore[override]
        """Returns no lengths."""
        return super().forward(feats, feat_lens).frames


class WrongHop(Waveform):
    """Says that its frames are half as far apart as they are."""

    hop_length = 160


class Halves(Convolutions):
    """Has weights of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


class ThreeStates(Convolutions):
    """Returns outputs of layers, and does not say of how many."""

    def hidden_states(self, feats: Tensor, feat_lens: Tensor) -> HiddenStates:
        """Returns three outputs."""
        frames, lens = self(feats, feat_lens)
        return HiddenStates([frames] * 3, lens)


class WithoutForward(Encoder):
    """Encodes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.subsampling_factor = 16, 4


class OtherMels(Convolutions):
    """Reads more mel bins than there are."""

    def __init__(self) -> None:
        super().__init__(num_mels=128)


class Detached(Convolutions):
    """Returns frames that no gradient leads through."""

    def forward(self, feats: Tensor, feat_lens: Tensor) -> EncoderOutput:
        """Returns detached frames."""
        frames, lens = super().forward(feats, feat_lens)
        return EncoderOutput(frames.detach(), lens)


class RandomElsewhere(Convolutions):
    """Draws from the generators of NumPy and Python."""

    def forward(self, feats: Tensor, feat_lens: Tensor) -> EncoderOutput:
        """Returns frames times numbers that are drawn."""
        frames, lens = super().forward(feats, feat_lens)
        return EncoderOutput(frames * (1 + np.random.rand() + random.random()), lens)
