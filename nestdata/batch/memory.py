"""Memory for the arrays of one batch, and its shared form: a ring of slots that loader workers fill in place.

The memory of a ring is laid out once and mapped by the rank and by its loader workers. A worker fills a slot, and only
the positions of the arrays travel through the queue. The rank alone decides which slot is free: a slot is used again
when no tensor refers to it any more.

The memory belongs to a file without a name, so that nothing is left behind when every process is killed.
"""

import math
import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass, fields
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from nestdata.batch.batch import Microbatch

# Every array starts at a multiple of this number of bytes, the size of a cache line.
_ALIGNMENT = 64


class BatchMemory:
    """Allocates the arrays of one batch: in a slot as long as they fit, otherwise as new arrays.

    Args:
        slot: The bytes of the slot, shape (bytes,); without one, every array is new.
    """

    def __init__(self, slot: NDArray[np.uint8] | None = None) -> None:
        self._slot = slot
        self._used = 0

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Returns an array of undefined content."""
        array = self._take(shape, np.dtype(dtype))
        return np.empty(shape, dtype) if array is None else array

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Returns an array of zeros."""
        array = self._take(shape, np.dtype(dtype))
        if array is None:
            return np.zeros(shape, dtype)  # the system zeroes new memory when it is first used
        array.fill(0)
        return array

    def _take(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        if self._slot is None:
            return None
        end = self._used + math.prod(np.atleast_1d(shape).tolist()) * dtype.itemsize
        if end > len(self._slot):
            return None
        array = self._slot[self._used : end].view(dtype).reshape(shape)
        self._used = aligned(end)
        return array


def aligned(num_bytes: int) -> int:
    """Returns the number of bytes that an array of `num_bytes` takes in a slot."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


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
        # The storage of the tensor holds a reference to this very array, views of the tensor to the storage.
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
class _View:
    """A tensor in a slot."""

    first_byte: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def open(self, memory: Tensor) -> Tensor:
        """Returns the tensor on the memory of its slot."""
        num_bytes = self.dtype.itemsize * math.prod(self.shape)
        return memory[self.first_byte : self.first_byte + num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class FilledSlot:
    """A batch as it travels from a worker to its rank: the positions of its tensors in the slot, and everything else.

    A tensor that did not fit into the slot travels as it is.
    """

    slot: int
    kind: type[Microbatch]
    fields: dict[str, Any]

    @classmethod
    def of(cls, batch: Microbatch, slot: int, memory: NDArray[np.uint8]) -> "FilledSlot":
        """Returns what travels of a batch whose tensors are in the memory of a slot."""
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        start = memory.ctypes.data
        for name, tensor in batch.tensors().items():
            first_byte = tensor.data_ptr() - start
            if 0 <= first_byte < len(memory) and tensor.is_contiguous():
                values[name] = _View(first_byte, tuple(tensor.shape), tensor.dtype)
        return cls(slot, type(batch), values)

    def open(self, ring: SlotRing) -> Any:
        """Returns the batch with tensors on the memory of its slot."""
        memory = ring.tensor(self.slot)
        opened = {name: value.open(memory) for name, value in self.fields.items() if isinstance(value, _View)}
        return self.kind(**{**self.fields, **opened})


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
