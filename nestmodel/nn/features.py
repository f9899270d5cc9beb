"""Log-mel features of audio, normalised per utterance and mel bin unless `normalize` is NA.

This module computes frames from samples, in float32 for every precision mode of a run, without gradients. It adds no
noise other than dither and applies no masks. The valid frames of an utterance do not depend on its padding or on the
other utterances of its batch, except for rounding, so clean and noisy audio may be concatenated and processed in one
call.

`LogMelFeatures` defines the features, operation by operation. With compiled code, torch's compiler fuses the operations
before the Fourier transform, and the operations after it; the results agree except for rounding.
"""

from typing import NamedTuple

import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nestdata.filters import mel_filters
from nestmodel.config import FeatureConfig
from nestmodel.nn.backend import KERNELS, Backend
from nestmodel.nn.compiler import allow_shapes, compiled_if_set
from nestmodel.nn.precision import exact_matmul

LOG_OFFSET = 2.0**-24
"""Added to the mel energies, so that the logarithm of silence is finite."""

STD_OFFSET = 1e-5
"""Added to the standard deviations, which are divisors and zero for a constant bin."""


class AudioCache(NamedTuple):
    """Cached samples of a stream, and its length so far."""

    samples: Float[Tensor, "1 cached_samples"]
    """Emphasised samples, from the first sample of the next frame on."""

    last: Float[Tensor, "1 1"]
    """The last sample, before emphasis."""

    num_samples: int = 0
    num_frames: int = 0


class LogMelFeatures(nn.Module):
    """Computes log-mel frames, by default with zero mean and unit deviation over each utterance.

    Autocast has no effect. A module that was converted to float64 computes in float64.

    Source: NEST, arXiv:2408.13106, with the numerics of NeMo 2.5. Differs: dither is never written into the caller's
    audio.
    """

    window: Tensor
    fb: Tensor

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("window", torch.hann_window(config.window_length, periodic=False))
        filters = mel_filters(config.num_mels, config.n_fft // 2 + 1, config.sampling_rate)
        self.register_buffer("fb", filters.unsqueeze(0).to(self.window.device))
        self.backend = KERNELS

    def use_backend(self, backend: Backend) -> None:
        """Sets whether `forward` is compiled by torch at its first use; all instances share the compiled code.

        The Fourier transform stays a call of its own, because the compiler writes no code for complex numbers. So does
        the dither, because compiled code would draw other numbers than torch's generator.
        """
        self.backend = backend
        if backend.compiled:
            allow_shapes(backend.num_shapes)  # in training with dither, in validation without

    @torch.no_grad()
    def forward(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
        """Computes log-mel frames, normalised as set. Dithers in training mode, from torch's global generator.

        Args:
            audio: Amplitude in [-1, 1]. Samples past an utterance's length are ignored. Not modified.
            audio_lens: Number of valid samples of each utterance.

        Returns:
            The frames, and the number of valid frames of each utterance, its samples // hop_length. Frames past the
            valid ones are zero; the number of frames is a multiple of `pad_to`.
        """
        before, after = (compiled_if_set(function, self.backend) for function in (frame_signal, compute_features))
        audio, feat_lens = self._in_full_precision(audio), audio_lens // self.config.hop_length
        with torch.autocast(audio.device.type, enabled=False):
            dither = self._draw_dither(audio)
            self._mark_varying_sizes(audio, dither, audio_lens, feat_lens)
            spectrum = _transform(before(self.config, self.window, audio, dither, audio_lens))
            self._mark_varying_sizes(spectrum)
            feats: Tensor = after(self.config, self.fb, spectrum, feat_lens)
            return feats, feat_lens

    def _mark_varying_sizes(self, *tensors: Tensor | None) -> None:
        """Tells the compiler which sizes differ from batch to batch, so that its first code accepts any size.

        Batches differ in utterances and in samples or frames, the first two sizes.
        """
        if self.backend.compiles_varying_shapes:
            for tensor in (tensor for tensor in tensors if tensor is not None):
                dynamo.maybe_mark_dynamic(tensor, [*range(min(tensor.dim(), 2))])

    @torch.no_grad()
    def log_mels(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
        """Computes log-mel frames that are not normalised, operation by operation. Dithers in training mode.

        Args:
            audio: As for `forward`.
            audio_lens: Number of valid samples of each utterance.

        Returns:
            The natural logarithms of the mel energies of samples // hop_length + 1 centred frames, and the number of
            valid frames of each utterance, its samples // hop_length. Frames past the valid ones are meaningless.
        """
        audio = self._in_full_precision(audio)
        with torch.autocast(audio.device.type, enabled=False):
            frames = frame_signal(self.config, self.window, audio, self._draw_dither(audio), audio_lens)
            return _log_mels(self.fb, _transform(frames)), audio_lens // self.config.hop_length

    def start(self) -> AudioCache:
        """Returns the cache before the first sample: silence."""
        silence = torch.zeros(1, self.config.n_fft // 2, device=self.window.device)
        return AudioCache(samples=silence, last=silence[:, :1])

    @torch.no_grad()
    def extend(
        self, audio: Float[Tensor, "1 samples"], cache: AudioCache, *, is_last: bool = False
    ) -> tuple[Float[Tensor, "1 mels frames"], AudioCache]:
        """Computes the valid log-mel frames that the next samples of a stream complete, not normalised, without dither.

        Args:
            audio: The next samples, amplitude in [-1, 1].
            cache: Cache of the samples before them; at first, the result of `start`.
            is_last: Whether the stream ends here, so that zeros follow.

        Returns:
            The frames, and the cache for the next samples.
        """
        config, audio = self.config, self._in_full_precision(audio)
        with torch.autocast(audio.device.type, enabled=False):
            both = torch.cat([cache.last, audio], dim=1)
            samples = torch.cat([cache.samples, audio - config.preemphasis * both[:, :-1]], dim=1)
            if is_last:
                samples = F.pad(samples, (0, config.n_fft // 2))
            num_samples = cache.num_samples + audio.shape[1]
            num_complete = max(0, (samples.shape[1] - config.n_fft) // config.hop_length + 1)
            num_frames = min(num_complete, num_samples // config.hop_length - cache.num_frames)
            kept = samples[:, num_frames * config.hop_length :].clone()  # not a view of all samples
            cache = AudioCache(kept, both[:, -1:].clone(), num_samples, cache.num_frames + num_frames)
            if num_frames == 0:
                return samples.new_zeros(1, config.num_mels, 0), cache
            framed = _window_frames(config, self.window, samples)[:, :num_frames]
            return _log_mels(self.fb, _transform(framed)), cache

    def _in_full_precision(self, audio: Float[Tensor, "batch samples"]) -> Float[Tensor, "batch samples"]:
        """Returns audio in float32; in float64 if that is the type of this module."""
        return audio.to(torch.float64 if self.window.dtype == torch.float64 else torch.float32)

    def _draw_dither(self, audio: Float[Tensor, "batch samples"]) -> Float[Tensor, "batch samples"] | None:
        if self.training and self.config.dither > 0.0:
            return torch.empty_like(audio).normal_(std=self.config.dither)
        return None


def frame_signal(
    config: FeatureConfig,
    window: Float[Tensor, " window"],
    audio: Float[Tensor, "batch samples"],
    dither: Float[Tensor, "batch samples"] | None,
    audio_lens: Int[Tensor, " batch"],
) -> Float[Tensor, "batch frames window_and_padding"]:
    """Computes the input of the Fourier transform: dithered, emphasised and windowed frames; the padding is silent.

    Args:
        config: Settings.
        window: Window, of `window_length` samples.
        audio: Amplitude in [-1, 1].
        dither: Noise that is added to the audio.
        audio_lens: Number of valid samples of each utterance.
    """
    if dither is not None:
        audio = audio + dither
    emphasised = audio - config.preemphasis * F.pad(audio[:, :-1], (1, 0))  # the first sample has no previous one
    is_padding = torch.arange(audio.shape[1], device=audio.device) >= audio_lens.unsqueeze(1)
    emphasised.masked_fill_(is_padding, 0.0)
    margin = config.n_fft // 2
    return _window_frames(config, window, F.pad(emphasised, (margin, margin)))


def _window_frames(
    config: FeatureConfig, window: Float[Tensor, " window"], samples: Float[Tensor, "batch samples"]
) -> Float[Tensor, "batch frames window_and_padding"]:
    """Returns the windowed frames of n_fft samples that begin every `hop_length` samples."""
    left = (config.n_fft - config.window_length) // 2
    centred = samples.unfold(1, config.n_fft, config.hop_length)
    return centred * F.pad(window, (left, config.n_fft - config.window_length - left))


def _transform(
    frames: Float[Tensor, "batch frames window_and_padding"],
) -> Float[Tensor, "batch frames frequencies 2"]:
    """Returns the real and imaginary parts of the Fourier transform of each frame."""
    return torch.view_as_real(torch.fft.rfft(frames))


def compute_features(
    config: FeatureConfig,
    mel_weights: Float[Tensor, "1 mels frequencies"],
    spectrum: Float[Tensor, "batch frames frequencies 2"],
    feat_lens: Int[Tensor, " batch"],
) -> Float[Tensor, "batch mels padded_frames"]:
    """Computes log-mel frames of a spectrum, normalised as set, and padded to a multiple of `pad_to`.

    Args:
        config: Settings.
        mel_weights: Share of each frequency's energy in each mel bin.
        spectrum: Real and imaginary parts.
        feat_lens: Number of valid frames of each utterance.
    """
    finish = normalise if config.normalize == "per_feature" else _without_padding
    feats = finish(_log_mels(mel_weights, spectrum), feat_lens)
    return F.pad(feats, (0, -feats.shape[-1] % config.pad_to))


def _log_mels(
    mel_weights: Float[Tensor, "1 mels frequencies"], spectrum: Float[Tensor, "batch frames frequencies 2"]
) -> Float[Tensor, "batch mels frames"]:
    power = spectrum.transpose(1, 2).square().sum(-1)
    return exact_matmul(mel_weights, power).add_(LOG_OFFSET).log_()


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
    is_padding = _is_padding(log_mels, feat_lens)
    num_valid = feat_lens.view(-1, 1, 1)
    mean = log_mels.masked_fill(is_padding, 0.0).sum(-1, keepdim=True) / num_valid.clamp(min=1)
    centred = (log_mels - mean).masked_fill_(is_padding, 0.0)
    variance = centred.square().sum(-1, keepdim=True) / (num_valid - 1).clamp(min=1)
    return centred.div_(variance.sqrt_().add_(STD_OFFSET))


def _without_padding(
    log_mels: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]
) -> Float[Tensor, "batch mels frames"]:
    return log_mels.masked_fill(_is_padding(log_mels, feat_lens), 0.0)


def _is_padding(
    log_mels: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch 1 frames"]:
    return (torch.arange(log_mels.shape[-1], device=log_mels.device) >= feat_lens.unsqueeze(1)).unsqueeze(1)
