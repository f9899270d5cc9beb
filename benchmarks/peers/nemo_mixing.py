"""NeMo's augmentation with parts of it changed as in nestdata; time_to_loss.py runs it.

Needs nemo_toolkit[asr] 3.0.0, but not this package.
"""

from dataclasses import replace
from typing import Any

import torch
from nemo.collections.asr.modules.ssl_modules import MultiSpeakerNoiseAugmentation


class KeptLengths(MultiSpeakerNoiseAugmentation):  # type: ignore[misc]
    """Noisy audio is as long as clean audio; NeMo's may be as short as the crop of noise."""

    def __call__(self, batch: Any) -> Any:
        """Returns the batch with noisy audio of shape (batch, samples)."""
        return replace(super().__call__(batch), noisy_audio_len=batch.audio_len)


class MixedAsOurs(KeptLengths):
    """Utterances that are not selected stay clean, and the level is that over the mixed samples."""

    def __call__(self, batch: Any) -> Any:
        """Returns the batch with noisy audio of shape (batch, samples)."""
        crops = batch.noise.clone()
        mixed = super().__call__(batch)
        for audio, noise, crop in zip(mixed.audio, mixed.noise, crops, strict=True):
            # NeMo's gain is for the power of the whole utterance: sum(audio²) / sum(noise²) is the drawn ratio.
            part = audio[noise != 0].square().sum() / audio.square().sum().clamp_min(1e-20)
            noise *= 0.0 if torch.equal(noise, crop) else part.sqrt()
        return replace(mixed, noisy_audio=mixed.audio + mixed.noise)
