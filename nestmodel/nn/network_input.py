"""The input of the network: a microbatch with the masks that were drawn for it.

Masks are drawn on the CPU, from the key of the microbatch and the lengths of its audio, and are copied to the device
together with the audio. The network then reads everything from the device and the CPU never waits for it. A
`MaskedBatch` is on the CPU, and its method `to` returns a `NetworkInput`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nestdata import AudioNoiseBatch, Microbatch, PackedBatch
from nestmodel.attention_context import Context
from nestmodel.nn.encoder import DropoutKeys


class Masks(NamedTuple):
    """The masked frames and the scored tokens of a microbatch."""

    is_masked: Bool[Tensor, "batch masked_frames"]
    """True where a frame is masked: an encoder frame if `masking.position` is post_conv, otherwise a feature frame."""

    is_scored: Bool[Tensor, "batch enc_frames"]
    """True for the encoder frames that are scored."""

    scored_rows: Int[Tensor, " scored"]
    """Positions of the True values in the flattened `is_scored`."""


@dataclass(frozen=True, kw_only=True)
class NetworkInput(Microbatch):
    """What the network reads of a microbatch, on the device of the network."""

    audio: Float[Tensor, "batch samples"]
    """Clean speech."""

    audio_len: Int[Tensor, " batch"]

    noisy_audio: Float[Tensor, "batch samples"]
    """Clean speech with its interference."""

    is_masked: Bool[Tensor, "batch masked_frames"]
    """See `Masks`."""

    is_scored: Bool[Tensor, "batch enc_frames"]
    """See `Masks`."""

    scored_rows: Int[Tensor, " scored"]
    """See `Masks`."""

    num_samples: int
    """Sum of `audio_len`."""

    dropout_keys: DropoutKeys | None = None
    """See `MaskedBatch`."""

    att_context: Context | None = None
    """See `MaskedBatch`."""

    @property
    def masks(self) -> Masks:
        """The masked frames and the scored tokens."""
        return Masks(self.is_masked, self.is_scored, self.scored_rows)


@dataclass(frozen=True, kw_only=True)
class MaskedBatch:
    """A microbatch and the masks that were drawn for it, before it is copied to the device of the network."""

    batch: AudioNoiseBatch | PackedBatch
    masks: Masks
    """On the CPU."""

    num_samples: int
    """Sum of `audio_len`."""

    dropout_keys: DropoutKeys | None = None
    """On the CPU; determine what dropout drops. Without them, it is drawn from the global generator of the device."""

    att_context: Context | None = None
    """Attention context that was drawn for it; None for the first one of the encoder."""

    def pin_masks(self) -> "MaskedBatch":
        """Returns the batch with its masks and keys in page-locked memory, for asynchronous copies to a GPU."""
        keys = None if self.dropout_keys is None else self.dropout_keys.pin_memory()
        return replace(self, masks=Masks(*(tensor.pin_memory() for tensor in self.masks)), dropout_keys=keys)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> NetworkInput:
        """Copies what the network reads to a device, and unpacks it there.

        Args:
            device: Device of the network.
            non_blocking: As for `Microbatch.to`.
        """
        batch = self.batch
        if isinstance(batch, PackedBatch):
            batch = batch.to(device, non_blocking=non_blocking)
            audio, noisy_audio = batch.signals()
        else:
            audio, noisy_audio = batch.audio, batch.noisy_audio
        inputs = NetworkInput(
            audio=audio,
            audio_len=batch.audio_len,
            noisy_audio=noisy_audio,
            **self.masks._asdict(),
            num_samples=self.num_samples,
            dropout_keys=self.dropout_keys,
            att_context=self.att_context,
            **batch.metadata(),
        )
        return inputs.to(device, non_blocking=non_blocking)
