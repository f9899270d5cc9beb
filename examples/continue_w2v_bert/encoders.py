"""Encoders of transformers for NEST: w2v-BERT 2.0, which reads filterbanks, and wav2vec 2.0, which reads audio.

Each brings the features that it was pretrained with. nestmodel masks them, and predicts tokens of log-mels of the clean
audio: docs/training.md has the commands.
"""

import math

import torch
from torch import Tensor, nn
from torchaudio.compliance.kaldi import fbank
from transformers import Wav2Vec2BertModel, Wav2Vec2Model

from nestmodel import EncoderOutput, FeatureEncoder, HiddenStates

# What is masked and dropped is drawn by nestmodel and by torch, so that a resume is exact.
_SETTINGS = {"apply_spec_augment": False, "layerdrop": 0.0}


class _OfTransformers(FeatureEncoder):
    """An encoder around `model`, a model of transformers."""

    subsampling_factor = 1
    model: nn.Module

    def use(self, model: nn.Module) -> None:
        """Keeps a model, without the vector for masks of its own, which nothing here uses."""
        self.model = model
        self.dim = model.config.hidden_size
        if hasattr(model, "masked_spec_embed"):
            model.masked_spec_embed.requires_grad_(False)


class W2vBert(_OfTransformers):
    """w2v-BERT 2.0, such as facebook/w2v-bert-2.0.

    Args:
        name: On the hub, or a folder that `save_pretrained` has written.
    """

    num_features, hop_length = 160, 320

    def __init__(self, name: str) -> None:
        super().__init__()
        self.use(Wav2Vec2BertModel.from_pretrained(name, dtype=torch.float32, **_SETTINGS))
        self.num_layers = self.model.config.num_hidden_layers

    def feature_lens(self, audio_lens: Tensor) -> Tensor:
        """Returns the number of pairs of filterbank frames of 25 ms."""
        return ((audio_lens - 400) // 160 + 1).clamp(min=0) // 2

    @torch.no_grad()
    def features(self, audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns pairs of filterbank frames, normalised over the utterance, as `SeamlessM4TFeatureExtractor` does."""
        feats = audio.new_zeros(len(audio), self.num_features, int(self.feature_lens(torch.tensor(audio.shape[1]))))
        for row, length in enumerate(audio_lens.tolist()):
            samples = 2**15 * audio[row : row + 1, :length].float()
            mels = fbank(samples, num_mel_bins=80, window_type="povey") if length >= 400 else audio.new_zeros(0, 80)
            mels = (mels - mels.mean(0)) / (mels.var(0) + 1e-7).sqrt()
            pairs = mels[: len(mels) // 2 * 2].reshape(-1, self.num_features)
            feats[row, :, : len(pairs)] = pairs.T
        return feats, self.feature_lens(audio_lens)

    def forward(self, feats: Tensor, feat_lens: Tensor) -> EncoderOutput:
        """Returns the output of the last layer."""
        return EncoderOutput(self.hidden_states(feats, feat_lens).states[-1], feat_lens)

    def hidden_states(self, feats: Tensor, feat_lens: Tensor) -> HiddenStates:
        """Returns the input of the first layer and the output of each layer."""
        output = self.model(feats.transpose(1, 2), attention_mask=_mask(feats, feat_lens), output_hidden_states=True)
        return HiddenStates(list(output.hidden_states), feat_lens)


class Wav2Vec2(_OfTransformers):
    """wav2vec 2.0, such as facebook/wav2vec2-large-lv60; frames of its convolutions are masked.

    Args:
        name: On the hub, or a folder that `save_pretrained` has written.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.use(Wav2Vec2Model.from_pretrained(name, dtype=torch.float32, **_SETTINGS))
        self.num_features, self.hop_length = self.model.config.conv_dim[-1], math.prod(self.model.config.conv_stride)

    def feature_lens(self, audio_lens: Tensor) -> Tensor:
        """Returns the number of frames of the convolutions."""
        for kernel, stride in zip(self.model.config.conv_kernel, self.model.config.conv_stride, strict=True):
            audio_lens = ((audio_lens - kernel) // stride + 1).clamp(min=0)
        return audio_lens

    def features(self, audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns frames of the convolutions, of audio with zero mean and unit variance over the utterance."""
        is_audio = torch.arange(audio.shape[1], device=audio.device) < audio_lens[:, None]
        mean = audio.sum(1, keepdim=True) / audio_lens[:, None]
        deviation = (audio - mean) * is_audio
        variance = deviation.square().sum(1, keepdim=True) / audio_lens[:, None]
        return self.model.feature_extractor(deviation / (variance + 1e-7).sqrt()), self.feature_lens(audio_lens)

    def forward(self, feats: Tensor, feat_lens: Tensor) -> EncoderOutput:
        """Returns the output of the last layer."""
        projected, _ = self.model.feature_projection(feats.transpose(1, 2))
        output = self.model.encoder(projected, attention_mask=_mask(feats, feat_lens))
        return EncoderOutput(output.last_hidden_state, feat_lens)


def _mask(feats: Tensor, feat_lens: Tensor) -> Tensor:
    return torch.arange(feats.shape[2], device=feats.device) < feat_lens[:, None]
