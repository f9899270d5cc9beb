"""Memory for the arrays of one batch, and its shared form: a ring of slots that loader workers fill in place.

The memory of a ring is laid out once and mapped by the rank and by its loader workers. A worker fills a slot, and only
the shape of the batch is sent through the queue. The rank alone decides which slot is free: a slot is used again when
no tensor refers to it any more.

The memory belongs to a file without a name, so that nothing is left behind when every process is killed.
"""

import math
import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestdata.batch.batch import AudioNoiseBatch

# Every array starts at a multiple of this number of bytes, the size of a cache line.
_ALIGNMENT = 64
_SIGNALS = ("audio", "noise", "noisy_audio")


class _Place(NamedTuple):
    """Where a tensor of a batch is in its slot."""

    start: int
    end: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _layout(num_cuts: int, num_samples: int) -> dict[str, _Place]:
    """Returns the places of the tensors of a batch, by field."""
    places, start = {}, 0
    for name in (*_SIGNALS, *(f"{signal}_len" for signal in _SIGNALS)):
        shape, dtype = ((num_cuts, num_samples), np.float32) if name in _SIGNALS else ((num_cuts,), np.int64)
        place = _Place(start, start + math.prod(shape) * np.dtype(dtype).itemsize, shape, np.dtype(dtype))
        start = _aligned(place.end)
        places[name] = place
    return places


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def bytes_of_batch(num_cuts: int, num_samples: int) -> int:
    """Returns the number of bytes that a batch takes in a slot."""
    return max(_aligned(place.end) for place in _layout(num_cuts, num_samples).values())


def batch_arrays(num_cuts: int, num_samples: int, slot: NDArray[np.uint8] | None = None) -> dict[str, NDArray[Any]]:
    """Returns arrays for the tensors of a batch, by field: zeros for `noise`, others of undefined content.

    Args:
        num_cuts: Number of cuts.
        num_samples: Length to which they are padded.
        slot: The bytes of the slot that holds the arrays, shape (bytes,); by default, the arrays are new.
    """
    places = _layout(num_cuts, num_samples)
    if slot is None:
        # The system zeroes new memory when it is first used.
        return {
            name: (np.zeros if name == "noise" else np.empty)(place.shape, place.dtype)
            for name, place in places.items()
        }
    arrays = {name: slot[at.start : at.end].view(at.dtype).reshape(at.shape) for name, at in places.items()}
    arrays["noise"].fill(0)
    return arrays


class SlotRing:
    """Slots of shared memory for batches.

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


@dataclass(frozen=True)
class FilledSlot:
    """A batch as a worker sends it to its rank: the slot with its tensors, and everything else."""

    slot: int
    shape: tuple[int, int]
    metadata: dict[str, Any]

    @classmethod
    def of(cls, batch: AudioNoiseBatch, slot: int, memory: NDArray[np.uint8]) -> "FilledSlot":
        """Returns the form in which a batch is sent whose tensors are in a slot.

        Raises:
            ValueError: A tensor is elsewhere, so that it would not be sent.
        """
        num_cuts, num_samples = batch.audio.shape
        begin, places = memory.ctypes.data, _layout(num_cuts, num_samples)
        if elsewhere := [name for name, at in places.items() if getattr(batch, name).data_ptr() != begin + at.start]:
            raise ValueError(
                f"the data set gave a batch whose {', '.join(elsewhere)} is not in the memory that `load` was given. "
                "Write into the tensors of the batch instead of replacing them."
            )
        return cls(slot, (num_cuts, num_samples), batch.metadata())

    def open(self, ring: SlotRing) -> AudioNoiseBatch:
        """Returns the batch with tensors on the memory of its slot."""
        memory = ring.tensor(self.slot)
        tensors = {
            name: memory[at.start : at.end].view(torch.float32 if name in _SIGNALS else torch.int64).view(at.shape)
            for name, at in _layout(*self.shape).items()
        }
        fields: dict[str, Any] = {**tensors, **self.metadata}
        return AudioNoiseBatch(**fields)


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
