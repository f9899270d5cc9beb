"""`AudioNoiseBatch`, one microbatch of clean and noisy speech."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from threading import Lock
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nestdata.batch.bad_audio import BadCut
from nestdata.batch.mix import Mix
from nestdata.batch.remote import RemoteStats
from nestdata.plan.microbatch import MicrobatchKey

Batch = TypeVar("Batch", bound="Microbatch")


@dataclass(frozen=True, kw_only=True, repr=False)
class Microbatch:
    """What is known about the cuts of a microbatch, and the operations on all of its tensors."""

    sample_id: list[str]
    """Ids of the cuts."""

    mixes: list[Mix]
    """Record of the interference of each cut."""

    bad_cuts: list[BadCut]
    """Cuts that were replaced because their audio could not be used."""

    key: MicrobatchKey

    indices: list[int] = field(default_factory=list)
    """Indices of the cuts in the corpora, from which `AudioNoiseDataset.cuts` reads labels; empty without corpora."""

    sampling_rate: int | None = None
    """Sampling rate in Hz; None if it is not known."""

    remote: RemoteStats | None = None
    """What reading from object stores has cost; None for corpora without remote audio."""

    def metadata(self) -> dict[str, Any]:
        """Returns the fields that every form of a microbatch has, by name: all but its tensors."""
        return {part.name: getattr(self, part.name) for part in fields(Microbatch)}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by field name, in the order of the fields."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self: Batch, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Returns the batch with its tensors on a device.

        Args:
            device: Where the tensors of the result are, such as `cuda:0`.
            non_blocking: Whether tensors in page-locked memory are copied to a GPU asynchronously. Their memory is then
                kept until the copy has ended.
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        on_host = [tensor for tensor in self.tensors().values() if tensor.device.type == "cpu"]
        if on_host and non_blocking and torch.device(device).type == "cuda":
            _keep_until_copied(on_host, torch.device(device))
        return moved

    def pin_memory(self: Batch) -> Batch:
        """Returns the batch in page-locked memory, which can be copied to a GPU asynchronously."""
        return self._map(Tensor.pin_memory)

    def __repr__(self) -> str:
        num_samples, num_mixed = self.tensors()["audio"].shape[1], sum(mix.mode != "none" for mix in self.mixes)
        rate = self.sampling_rate
        length = f"{num_samples} samples" if rate is None else f"{num_samples / rate:.2f} s at {rate} Hz"
        return (
            f"{type(self).__name__}(step {self.key.step}, microbatch {self.key.microbatch}: {len(self.sample_id)} cuts "
            f"padded to {length}, {num_mixed} with interference)"
        )

    def _map(self: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
        values: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **values)


@dataclass(frozen=True, kw_only=True, repr=False)
class AudioNoiseBatch(Microbatch):
    """One microbatch. Amplitudes are as in the files, usually in [-1, 1]; nothing is clipped.

    Lengths are in samples. Fields are named as in NEST. Each signal is zero after its length.
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


_being_copied: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
_being_copied_lock = Lock()


def _keep_until_copied(tensors: list[Tensor], device: torch.device) -> None:
    """Holds tensors until they have been copied: once they are gone, their memory is reused for another batch."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    with _being_copied_lock:
        _being_copied.append((event, tensors))
        while _being_copied and _being_copied[0][0].query():
            _being_copied.popleft()
