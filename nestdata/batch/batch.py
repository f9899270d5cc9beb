"""`AudioNoiseBatch`: what the data side hands to a model."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nestdata.batch.bad_audio import BadCut
from nestdata.batch.mix import Mix


class MicrobatchKey(NamedTuple):
    """Names a microbatch; with the plan and the corpora, it determines every sample of the batch."""

    epoch: int
    step: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class AudioNoiseBatch:
    """One microbatch. Amplitudes are as the files have them, usually in [-1, 1]; nothing is clipped.

    Lengths are in samples and follow NEST's names; rows are zero past their length.
    """

    audio: Float[Tensor, "batch samples"]
    """Clean speech."""

    audio_len: Int[Tensor, " batch"]

    noise: Float[Tensor, "batch samples"]
    """What was added, already scaled and placed: `noisy_audio = audio + noise`, unless transforms of `AugmentConfig`
    changed the noisy audio alone."""

    noise_len: Int[Tensor, " batch"]
    """`audio_len` where something was added, 0 where nothing was."""

    noisy_audio: Float[Tensor, "batch samples"]
    """Clean speech with its interference; bit for bit the clean audio where nothing was added."""

    noisy_audio_len: Int[Tensor, " batch"]
    """Always `audio_len`."""

    sample_id: list[str]
    """Ids of the cuts."""

    mixes: list[Mix]
    """What was done to each cut."""

    bad_cuts: list[BadCut]
    """Cuts whose audio could not be used, in whose place others stand."""

    key: MicrobatchKey

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name, in the order of the fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "AudioNoiseBatch":
        """Returns the batch with its tensors on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "AudioNoiseBatch":
        """Returns the batch in page-locked memory, from where it is copied to a GPU in the background."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "AudioNoiseBatch":
        values: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **values)
