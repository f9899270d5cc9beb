"""`AudioNoiseBatch`, one microbatch of clean and noisy speech, and the memory of its tensors.

Loader workers fill batches in place in slots of shared memory, so that only the shape of a batch is sent through their
queue. The memory of all slots is laid out once, and mapped by the rank and by its workers. It belongs to a file without
a name, so that nothing is left behind when every process is killed.
"""

import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from multiprocessing.reduction import DupFd
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from nestdata.batch.bad_audio import BadCut
from nestdata.batch.mix import Mix
from nestdata.batch.remote import RemoteStats
from nestdata.plan.microbatch import MicrobatchKey

# Every tensor starts at a multiple of this number of bytes, the size of a cache line.
_ALIGNMENT = 64
_SIGNALS = ("audio", "noise", "noisy_audio")

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


def bytes_of_batch(num_cuts: int, num_samples: int) -> int:
    """Returns the number of bytes that the tensors of a batch take."""
    return max(_aligned(place.end) for place in _places(num_cuts, num_samples))


def tensors_on(memory: Any, num_cuts: int, num_samples: int) -> dict[str, Any]:
    """Returns the tensors of a batch, by field, on given memory, whose content stays; on an array, they are arrays.

    Args:
        memory: A tensor or an array of bytes, shape (bytes,), with `bytes_of_batch` or more.
        num_cuts: Number of cuts.
        num_samples: Length to which they are padded.
    """
    types: Any = torch if isinstance(memory, Tensor) else np
    return {
        place.name: memory[place.start : place.end].view(getattr(types, place.dtype)).reshape(place.shape)
        for place in _places(num_cuts, num_samples)
    }


class _Place(NamedTuple):
    """Where a tensor of a batch is in its memory."""

    name: str
    start: int
    end: int
    shape: tuple[int, ...]
    dtype: str


def _places(num_cuts: int, num_samples: int) -> Iterator[_Place]:
    """Yields the places of the tensors: signals of 4 bytes for each sample, then lengths of 8 bytes."""
    start = 0
    for name in _SIGNALS:
        end = start + 4 * num_cuts * num_samples
        yield _Place(name, start, end, (num_cuts, num_samples), "float32")
        start = _aligned(end)
    for name in _SIGNALS:
        yield _Place(f"{name}_len", start, start + 8 * num_cuts, (num_cuts,), "int64")
        start = _aligned(start + 8 * num_cuts)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class SlotRing:
    """Slots of shared memory for batches. A slot is used again when no tensor refers to it any more.

    Args:
        num_slots: Number of slots.
        slot_bytes: Size of a slot; rounded up to whole pages.
        file: Descriptor of the memory of a ring in another process, which alone decides which slots are free. By
            default, the memory is new, and all slots are free.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, file: int | None = None) -> None:
        self.num_slots = num_slots
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = _open_unnamed_file(self.num_bytes) if file is None else file
        weakref.finalize(self, os.close, self._file).atexit = False
        self._bytes = np.frombuffer(mmap.mmap(self._file, self.num_bytes), np.uint8)
        self._free = list(range(num_slots)) if file is None else []

    @property
    def num_bytes(self) -> int:
        """Size of all slots."""
        return self.num_slots * self.slot_bytes

    @property
    def num_free(self) -> int:
        """Number of slots that no batch uses."""
        return len(self._free)

    def acquire(self) -> int | None:
        """Returns the number of a free slot, which is then in use; None if all slots are in use."""
        # The slot that became free last comes first: it may still be in the processor's cache.
        try:
            return self._free.pop()
        except IndexError:
            return None

    def bytes_of(self, slot: int) -> NDArray[np.uint8]:
        """Returns the memory of a slot, shape (slot_bytes,), for the worker that fills it."""
        return self._bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def tensor(self, slot: int) -> Tensor:
        """Returns the memory of a filled slot as bytes, shape (slot_bytes,).

        The slot becomes free when this tensor and all tensors and arrays that share its memory are gone.
        """
        array = self.bytes_of(slot)
        # The storage of the tensor refers to this very array, and views of the tensor refer to the storage.
        weakref.finalize(array, self._free.append, slot).atexit = False
        return torch.from_numpy(array)

    def pin(self) -> None:
        """Registers the memory as page-locked, so that a GPU can copy from it asynchronously.

        Raises:
            RuntimeError: CUDA cannot register the memory.
        """
        runtime = torch.cuda.cudart()
        address = self._bytes.ctypes.data
        torch.cuda.check_error(runtime.cudaHostRegister(address, self.num_bytes, 0))
        # The memory is unmapped when the last array on it is gone, which is after this.
        weakref.finalize(self._bytes, runtime.cudaHostUnregister, address).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled while a worker is started, which then receives a copy of the file descriptor.
        return _attach, (DupFd(self._file), self.num_slots, self.slot_bytes)


def _attach(file: Any, num_slots: int, slot_bytes: int) -> SlotRing:
    """Maps the memory of a ring in a worker."""
    return SlotRing(num_slots, slot_bytes, file=file.detach())


def _open_unnamed_file(num_bytes: int) -> int:
    """Returns the descriptor of a new file that has no name and therefore ends with the last process that uses it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("nestdata-batches")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.ftruncate(file, num_bytes)
    return file
