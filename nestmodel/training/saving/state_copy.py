"""Copies of a run's state, which are written to disk while training changes the original.

A copy has the same content as the original as far as `torch.save` can tell: tensors that share memory still do, and
views keep the whole memory that they are views of. The memory for tensors is allocated once and reused: fresh memory
has to be mapped first, which takes longer than the copy, in particular if it is page-locked.
"""

import copy
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class StateCopy(NamedTuple):
    """A copy of a state. Copies from a GPU may still be in flight; see `wait`."""

    state: dict[str, Any]
    events: tuple[torch.cuda.Event, ...]

    def wait(self) -> None:
        """Waits until all copies from GPUs have arrived; may be called in any thread."""
        for event in self.events:
            # A new thread would use the first GPU, on which the driver could reserve memory for this process.
            with torch.cuda.device(event.device):
                event.synchronize()


class StateCopier:
    """Copies states into memory of the CPU, which each copy reuses: it is valid until the next one is made.

    Copies from a GPU are queued behind the work that the GPU has to do, so that the CPU does not wait for them. Their
    memory is page-locked. Values that are not tensors are copied by `copy.deepcopy`.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, state: dict[str, Any]) -> StateCopy:
        """Returns a copy of a state and invalidates the one before.

        Raises:
            RuntimeError: There is not enough memory (see `is_out_of_memory`).
            pickle.PicklingError: The state contains something that cannot be saved.
        """
        tensors = [tensor for tensor in _tensors(state) if _is_plain(tensor)]
        # torch keeps one object for each storage, so that views of the same memory have the same one.
        storages = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}
        buffers = dict(zip(storages, self._filled(list(storages.values())), strict=True))
        copies = {id(tensor): _rebuilt(tensor, buffers[id(tensor.untyped_storage())]) for tensor in tensors}
        # `deepcopy` takes the copies of objects that it has seen already from this dictionary.
        copied = copy.deepcopy(state, copies)
        devices = {storage.device for storage in storages.values() if storage.device.type == "cuda"}
        return StateCopy(copied, tuple(torch.cuda.current_stream(device).record_event() for device in devices))

    def release(self) -> None:
        """Frees the memory. torch keeps page-locked memory for later use unless it is told to return it."""
        self._buffers = []
        if torch.cuda.is_initialized():
            torch._C._host_emptyCache()

    def _filled(self, storages: list[torch.UntypedStorage]) -> Iterator[Tensor]:
        """Yields a buffer with the bytes of each storage."""
        del self._buffers[len(storages) :]
        for index, storage in enumerate(storages):
            is_pinned = storage.device.type == "cuda"
            if index == len(self._buffers):
                self._buffers.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
            if self._buffers[index].numel() != storage.nbytes() or self._buffers[index].is_pinned() != is_pinned:
                self._buffers[index] = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=is_pinned
                )
            original = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            yield self._buffers[index].copy_(original, non_blocking=is_pinned)


class _TensorFinder(pickle.Pickler):
    """Collects the tensors that pickling a state would save."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=2)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: object) -> str | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return "tensor"


class _Nowhere:
    """A file that discards what is written."""

    def write(self, data: Any) -> int:
        return len(data)


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    finder = _TensorFinder()
    finder.dump(state)
    return finder.tensors


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether memory, offset, shape, strides and type describe a tensor; `deepcopy` copies any other."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    )


def _rebuilt(tensor: Tensor, buffer: Tensor) -> Tensor:
    """Returns the tensor that is to a buffer what the original is to its storage."""
    rebuilt = torch.empty(0, dtype=tensor.dtype, device="cpu")
    rebuilt.set_(buffer.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(rebuilt, requires_grad=tensor.requires_grad)
    return rebuilt.requires_grad_(tensor.requires_grad)
