"""`CopyAhead`: batches that are copied to a GPU while it computes with the batch before."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import pytorch_lightning as pl
import torch

from nestdata import Microbatch


@runtime_checkable
class Loader(Protocol):
    """Yields a known number of batches."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


def copied_ahead(loader: Loader, trainer: pl.Trainer) -> Loader:
    """Returns a loader whose batches are copied ahead to the GPU of a `NestModel`; for others, the loader itself."""
    device = trainer.strategy.root_device
    copy = getattr(trainer.lightning_module, "training_input", None)
    return loader if copy is None or device.type != "cuda" else CopyAhead(loader, copy, device)


class CopyAhead:
    """Copies each batch of a loader on a stream of its own, one batch before it is asked for.

    The memory of the GPU holds two batches: the current one and the next one. Copies take their memory from the
    allocator on their own stream. Before each copy, this stream waits for all work of the compute stream so far, so
    that memory which was freed meanwhile is no longer read when the copy overwrites it.

    Args:
        loader: Yields batches on the CPU, in page-locked memory.
        copy: Starts the copies of a batch on the current stream, and returns the batch on the GPU.
        device: The GPU.
    """

    def __init__(self, loader: Loader, copy: Callable[[Any], Microbatch], device: torch.device) -> None:
        self._loader = loader
        self._copy = copy
        self._device = device

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Microbatch]:
        """Yields batches that the current stream may read."""
        stream = torch.cuda.Stream(self._device)
        ahead: tuple[Microbatch, Any] | None = None  # with the event at the end of its copies
        for batch in self._loader:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                copied = self._copy(batch), stream.record_event()
            if ahead is not None:
                yield self._ready(*ahead)
            ahead = copied
        if ahead is not None:
            yield self._ready(*ahead)

    def _ready(self, batch: Microbatch, copied: Any) -> Microbatch:
        torch.cuda.current_stream(self._device).wait_event(copied)
        return batch
