"""`PackedBatch`, the compact form of a microbatch that is handed to a GPU and unpacked there."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from nestdata.batch.batch import AudioNoiseBatch, Microbatch
from nestdata.corpus.bank import FULL_SCALE


@dataclass(frozen=True, kw_only=True, repr=False)
class PackedBatch(Microbatch):
    """A microbatch with 16-bit audio as 16-bit integers, and noise only where it was added.

    It has about a quarter of the size of the `AudioNoiseBatch` that `unpack` returns, bit for bit the same on every
    device: the scale of the audio is a power of two, and each noisy sample is one sum.
    """

    audio: Num[Tensor, "batch samples"]
    """Clean speech: 16-bit integers if all cuts are 16-bit audio at the rate of the corpus, otherwise float32."""

    audio_len: Int[Tensor, " batch"]

    noise: Float[Tensor, " mixed_samples"]
    """The scaled interference of all segments, one after the other."""

    noise_len: Int[Tensor, " batch"]
    """`audio_len` for cuts with interference, 0 for cuts without."""

    segments: Int[Tensor, "2 segments"]
    """Where each segment starts in the flattened `audio`, and its number of samples."""

    def unpack(self) -> AudioNoiseBatch:
        """Returns the batch with all of its signals as float32, on the device of this batch."""
        audio, noisy = self.signals()
        noise = torch.zeros_like(audio)
        if self.noise.numel():
            noise.view(-1).index_copy_(0, self._positions(), self.noise)
        return AudioNoiseBatch(
            audio=audio,
            audio_len=self.audio_len,
            noise=noise,
            noise_len=self.noise_len,
            noisy_audio=noisy,
            noisy_audio_len=self.audio_len.clone(),
            **self.metadata(),
        )

    def signals(self) -> tuple[Float[Tensor, "batch samples"], Float[Tensor, "batch samples"]]:
        """Returns the clean and the noisy audio of `unpack`, without the noise, on the device of this batch."""
        audio = self.audio
        if audio.dtype == torch.int16:
            audio = audio.to(torch.float32).mul_(1.0 / FULL_SCALE)
        noisy = audio.clone()
        if self.noise.numel():
            positions = self._positions()
            samples = noisy.view(-1)
            samples.index_copy_(0, positions, samples[positions] + self.noise)
        return audio, noisy

    def _positions(self) -> Int[Tensor, " mixed_samples"]:
        """Returns the position in the flattened audio of every sample of `noise`."""
        starts, lengths = self.segments
        shifts = starts - (lengths.cumsum(0) - lengths)
        num_samples = self.noise.numel()  # given to `repeat_interleave`, which would otherwise wait for the GPU
        positions = torch.arange(num_samples, device=self.noise.device)
        return positions + torch.repeat_interleave(shifts, lengths, output_size=num_samples)
