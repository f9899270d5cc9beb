"""Log-mel features of audio, normalised per utterance and mel bin.

Owns the arithmetic from samples to frames, in float32 whatever the precision of the run, without gradients. Leaves
noise, mixing and masking to others. Guarantees that the valid frames of an utterance do not depend on what it is
padded with or batched with, but for rounding: so clean and noisy audio may go through in one call, concatenated.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchaudio.functional import melscale_fbanks

from nestmodel.config import FeatureConfig

LOG_OFFSET = 2.0**-24
"""Added to the mel energies, so that silence has a logarithm."""

STD_OFFSET = 1e-5
"""Added to the standard deviations, so that a constant bin can be divided."""


def exact_matmul(left: Float[Tensor, "*left"], right: Float[Tensor, "*right"]) -> Float[Tensor, "*product"]:
    """Multiplies float32 matrices in full precision, also where the run allows less."""
    if not left.is_cuda:
        return left @ right
    # A run that allows TF32 keeps 10 bits of a float32 factor, enough to change tokens; double is exempt from it.
    return (left.double() @ right.double()).float()


class LogMelFeatures(nn.Module):
    """Turns audio into log-mel frames with zero mean and unit deviation over each utterance.

    Source: NEST, arXiv:2408.13106, section 3.1, with the numerics of NeMo 2.5. Differs: dither is never written into
    the caller's audio.
    """

    window: Tensor
    fb: Tensor

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("window", torch.hann_window(config.window_length, periodic=False))
        mel_weights = melscale_fbanks(
            n_freqs=config.n_fft // 2 + 1,
            f_min=0.0,
            f_max=config.sampling_rate / 2,
            n_mels=config.num_mels,
            sample_rate=config.sampling_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        self.register_buffer("fb", mel_weights.T.contiguous().unsqueeze(0))

    def forward(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
        """See `Preprocessor.forward`; this is the arithmetic alone, and dithers in training mode."""
        log_mels = self._log_mels(self._emphasise(audio, audio_lens))
        feat_lens = audio_lens // self.config.hop_length
        feats = normalise(log_mels, feat_lens)
        return F.pad(feats, (0, -feats.shape[-1] % self.config.pad_to)), feat_lens

    def _emphasise(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch samples"]:
        """Dithers, subtracts a share of the previous sample (the first has none), and silences the padding."""
        if self.training and self.config.dither > 0.0:
            audio = torch.randn_like(audio).mul_(self.config.dither).add_(audio)
        emphasised = audio.clone()
        emphasised[:, 1:] -= self.config.preemphasis * audio[:, :-1]
        is_padding = torch.arange(audio.shape[1], device=audio.device) >= audio_lens.unsqueeze(1)
        return emphasised.masked_fill_(is_padding, 0.0)

    def _log_mels(self, audio: Float[Tensor, "batch samples"]) -> Float[Tensor, "batch mels frames"]:
        """Logarithm of the mel energies of samples // hop_length + 1 centred frames."""
        spectrum = torch.stft(
            audio,
            n_fft=self.config.n_fft,
            hop_length=self.config.hop_length,
            win_length=self.config.window_length,
            window=self.window,
            center=True,
            pad_mode="constant",
            return_complex=True,
        )
        power = torch.view_as_real(spectrum).square().sum(-1)
        return exact_matmul(self.fb, power).add_(LOG_OFFSET).log_()


class Preprocessor(nn.Module):
    """Runs `LogMelFeatures` in float32, outside autocast and without gradients."""

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.featurizer = LogMelFeatures(config)

    @torch.no_grad()
    def forward(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
        """Turns audio into normalised log-mel frames. Dithers in training mode, from torch's global generator.

        Args:
            audio: Amplitude in [-1, 1]; samples past an utterance's length are not read. Not written to.
            audio_lens: Valid samples of each utterance.

        Returns:
            The frames, zero past the valid ones, their number a multiple of `pad_to`; and the number of valid frames
            of each utterance, its samples // hop_length.
        """
        with torch.autocast(audio.device.type, enabled=False):
            feats: tuple[Tensor, Tensor] = self.featurizer(audio.float(), audio_lens)
        return feats


def normalise(
    log_mels: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]
) -> Float[Tensor, "batch mels frames"]:
    """Shifts and scales each mel bin of each utterance to zero mean and unit deviation over its valid frames.

    Args:
        log_mels: Logarithmic mel energies.
        feat_lens: Valid frames of each utterance.

    Returns:
        The normalised frames, zero past the valid ones. The deviation divides by the valid frames less one; a single
        valid frame has a deviation of 0, so it becomes 0 itself.
    """
    is_padding = (torch.arange(log_mels.shape[-1], device=log_mels.device) >= feat_lens.unsqueeze(1)).unsqueeze(1)
    num_valid = feat_lens.view(-1, 1, 1)
    mean = log_mels.masked_fill(is_padding, 0.0).sum(-1, keepdim=True) / num_valid.clamp(min=1)
    centred = (log_mels - mean).masked_fill_(is_padding, 0.0)
    variance = centred.square().sum(-1, keepdim=True) / (num_valid - 1).clamp(min=1)
    return centred.div_(variance.sqrt_().add_(STD_OFFSET))
