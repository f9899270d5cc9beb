"""The input of the network: a microbatch with the masks that were drawn for it.

Masks are drawn on the CPU, from the key of the microbatch and the lengths of its audio, and are copied to the device
together with the audio. The network then reads everything from the device and the CPU never waits for it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nestdata import AudioNoiseBatch, Microbatch
from nestmodel.attention_context import Context
from nestmodel.nn.encoder import DropoutKeys


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Random choices for a microbatch: masked frames and scored tokens, keys of dropout, and the attention context."""

    is_masked: Bool[Tensor, "batch masked_frames"]
    """True where a frame is masked: an encoder frame if `masking.position` is post_conv, otherwise a feature frame."""

    is_scored: Bool[Tensor, "batch enc_frames"]
    """True for the encoder frames that are scored."""

    scored_rows: Int[Tensor, " scored"]
    """Positions of the True values in the flattened `is_scored`."""

    dropout_keys: DropoutKeys | None = None
    """Determine what dropout drops. Without them, it is drawn from the global generator of the device."""

    att_context: Context | None = None
    """Attention context; None for the first one of the encoder."""


@dataclass(frozen=True, kw_only=True)
class NetworkInput(Microbatch, Masks):
    """What the network reads of a microbatch, on the device of the network."""

    audio: Float[Tensor, "batch samples"]
    """Clean speech."""

    audio_len: Int[Tensor, " batch"]

    noisy_audio: Float[Tensor, "batch samples"]
    """Clean speech with its interference."""

    num_samples: int
    """Sum of `audio_len`."""

    @classmethod
    def of(cls, batch: AudioNoiseBatch, masks: Masks, device: torch.device | str) -> "NetworkInput":
        """Copies what the network reads to a device.

        The CPU does not wait for a GPU, because masks are copied from page-locked memory; audio must be in such memory
        as well.

        Args:
            batch: The microbatch.
            masks: Masks of the microbatch, on the CPU.
            device: Device of the network.
        """
        drawn: dict[str, Any] = vars(masks)
        if torch.device(device).type == "cuda":
            drawn = {name: value.pin_memory() if isinstance(value, Tensor) else value for name, value in drawn.items()}
        joined = cls(
            audio=batch.audio,
            audio_len=batch.audio_len,
            noisy_audio=batch.noisy_audio,
            num_samples=int(batch.audio_len.sum()),
            **drawn,
            **batch.metadata(),
        )
        return joined.to(device, non_blocking=True)
