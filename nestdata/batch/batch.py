"""`AudioNoiseBatch`, one microbatch of clean and noisy speech, and the indices and keys that identify it."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nestdata.batch.bad_audio import BadCut
from nestdata.batch.mix import Mix


class BatchIndex(NamedTuple):
    """The position of a microbatch in training: `dataset[BatchIndex(step, microbatch)]`."""

    step: int
    """Optimizer step, counted from the start of training; it continues to count after the first epoch."""

    microbatch: int
    """Microbatch of the step, in [0, microbatches_per_step)."""


class MicrobatchKey(NamedTuple):
    """Identifies a microbatch; together with the plan and the corpora, it determines every sample of the batch."""

    epoch: int
    step: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class AudioNoiseBatch:
    """One microbatch. Amplitudes are those of the files, usually in [-1, 1]; nothing is clipped.

    Lengths are in samples. The field names are those of NEST. Each signal is zero after its length.
    """

    audio: Float[Tensor, "batch samples"]
    """Clean speech."""

    audio_len: Int[Tensor, " batch"]

    noise: Float[Tensor, "batch samples"]
    """The added interference after scaling: `noisy_audio = audio + noise`, unless transforms of `AugmentConfig` changed
    only the noisy audio."""

    noise_len: Int[Tensor, " batch"]
    """`audio_len` for cuts with interference, 0 for cuts without."""

    noisy_audio: Float[Tensor, "batch samples"]
    """Clean speech with its interference; equal to the clean audio bit for bit for cuts without interference."""

    noisy_audio_len: Int[Tensor, " batch"]
    """Always equal to `audio_len`."""

    sample_id: list[str]
    """Ids of the cuts."""

    mixes: list[Mix]
    """Record of the interference of each cut."""

    bad_cuts: list[BadCut]
    """Cuts that were replaced because their audio could not be used."""

    key: MicrobatchKey

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by field name, in the order of the fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "AudioNoiseBatch":
        """Returns the batch with its tensors on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "AudioNoiseBatch":
        """Returns the batch in page-locked memory, which can be copied to a GPU asynchronously."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "AudioNoiseBatch":
        values: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **values)
