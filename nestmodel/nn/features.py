"""Log-mel features of audio, normalised per utterance and mel bin.

This module computes frames from samples, in float32 for every precision mode of a run, without gradients. It adds no
noise other than dither and applies no masks. The valid frames of an utterance do not depend on its padding or on the
other utterances of its batch, except for rounding, so clean and noisy audio may be concatenated and processed in one
call.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchaudio.functional import melscale_fbanks

from nestmodel.config import FeatureConfig

LOG_OFFSET = 2.0**-24
"""Added to the mel energies, so that the logarithm of silence is finite."""

STD_OFFSET = 1e-5
"""Added to the standard deviations, so that a constant bin does not divide by zero."""


def exact_matmul(left: Float[Tensor, "*left"], right: Float[Tensor, "*right"]) -> Float[Tensor, "*product"]:
    """Multiplies float32 matrices in full precision, even if the run allows TF32."""
    if not left.is_cuda:
        return left @ right
    # TF32 keeps 10 bits of a float32 factor, which can change tokens. Double precision is never reduced to TF32.
    return (left.double() @ right.double()).float()


class LogMelFeatures(nn.Module):
    """Computes log-mel frames with zero mean and unit deviation over each utterance.

    Source: NEST, arXiv:2408.13106, section 3.1, with the numerics of NeMo 2.5. Differs: dither is never written into
    the caller's audio.
    """

    window: Tensor
    fb: Tensor

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("window", torch.hann_window(config.window_length, periodic=False))
        with torch.device("cpu"):  # torchaudio's function does not work on the device "meta"
            mel_weights = melscale_fbanks(
                n_freqs=config.n_fft // 2 + 1,
                f_min=0.0,
                f_max=config.sampling_rate / 2,
                n_mels=config.num_mels,
                sample_rate=config.sampling_rate,
                norm="slaney",
                mel_scale="slaney",
            )
        self.register_buffer("fb", mel_weights.T.contiguous().unsqueeze(0).to(self.window.device))

    def forward(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
        """Computes the same as `Preprocessor.forward`, but in the caller's dtype, autocast and gradient modes."""
        log_mels, feat_lens = self.log_mels(audio, audio_lens)
        feats = normalise(log_mels, feat_lens)
        return F.pad(feats, (0, -feats.shape[-1] % self.config.pad_to)), feat_lens

    def log_mels(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
        """Computes log-mel frames that are not normalised. Dithers in training mode.

        Args:
            audio: As for `Preprocessor.forward`.
            audio_lens: Number of valid samples of each utterance.

        Returns:
            The natural logarithms of the mel energies of samples // hop_length + 1 centred frames, and the number of
            valid frames of each utterance, its samples // hop_length. Frames past the valid ones are meaningless.
        """
        spectrum = torch.stft(
            self._emphasise(audio, audio_lens),
            n_fft=self.config.n_fft,
            hop_length=self.config.hop_length,
            win_length=self.config.window_length,
            window=self.window,
            center=True,
            pad_mode="constant",
            return_complex=True,
        )
        power = torch.view_as_real(spectrum).square().sum(-1)
        return exact_matmul(self.fb, power).add_(LOG_OFFSET).log_(), audio_lens // self.config.hop_length

    def _emphasise(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch samples"]:
        """Dithers, subtracts a share of the previous sample (the first sample has none), and zeroes the padding."""
        if self.training and self.config.dither > 0.0:
            audio = torch.randn_like(audio).mul_(self.config.dither).add_(audio)
        emphasised = audio.clone()
        emphasised[:, 1:] -= self.config.preemphasis * audio[:, :-1]
        is_padding = torch.arange(audio.shape[1], device=audio.device) >= audio_lens.unsqueeze(1)
        return emphasised.masked_fill_(is_padding, 0.0)


class Preprocessor(nn.Module):
    """Runs `LogMelFeatures` in float32, outside autocast and without gradients."""

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.featurizer = LogMelFeatures(config)

    @torch.no_grad()
    def forward(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
        """Computes normalised log-mel frames. Dithers in training mode, from torch's global generator.

        Args:
            audio: Amplitude in [-1, 1]. Samples past an utterance's length are ignored. Not modified.
            audio_lens: Number of valid samples of each utterance.

        Returns:
            The frames, and the number of valid frames of each utterance, its samples // hop_length. Frames past the
            valid ones are zero; the number of frames is a multiple of `pad_to`.
        """
        with torch.autocast(audio.device.type, enabled=False):
            feats: tuple[Tensor, Tensor] = self.featurizer(audio.float(), audio_lens)
        return feats

    @torch.no_grad()
    def log_mels(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
        """Computes log-mel frames that are not normalised; see `LogMelFeatures.log_mels`."""
        with torch.autocast(audio.device.type, enabled=False):
            return self.featurizer.log_mels(audio.float(), audio_lens)


def normalise(
    log_mels: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]
) -> Float[Tensor, "batch mels frames"]:
    """Shifts and scales each mel bin of each utterance to zero mean and unit deviation over its valid frames.

    Args:
        log_mels: Logarithms of the mel energies.
        feat_lens: Number of valid frames of each utterance.

    Returns:
        The normalised frames, zero past the valid ones. The variance divides by the number of valid frames minus one.
        The deviation of a single valid frame is 0, so the frame becomes 0.
    """
    is_padding = (torch.arange(log_mels.shape[-1], device=log_mels.device) >= feat_lens.unsqueeze(1)).unsqueeze(1)
    num_valid = feat_lens.view(-1, 1, 1)
    mean = log_mels.masked_fill(is_padding, 0.0).sum(-1, keepdim=True) / num_valid.clamp(min=1)
    centred = (log_mels - mean).masked_fill_(is_padding, 0.0)
    variance = centred.square().sum(-1, keepdim=True) / (num_valid - 1).clamp(min=1)
    return centred.div_(variance.sqrt_().add_(STD_OFFSET))
