"""`BatchLoader`: batches in order, from this process or from workers that fill them in place in shared memory."""

import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

import nestguard
from nestdata.batch.bad_audio import BadAudioConfig, BadAudioCounter
from nestdata.batch.batch import Batch, BatchIndex, Microbatch
from nestdata.batch.memory import BatchMemory, SlotRing
from nestdata.plan.batch_plan import BatchPlan

StartMethod = Literal["fork", "forkserver", "spawn"]
Load = Callable[[tuple[int, int], BatchMemory | None], Batch]

_log = logging.getLogger(__name__)

# Time after SIGTERM at which an alarm ends a loader worker that is still running.
_SECONDS_TO_FINISH = 60
# Batches that each worker has in progress or ready.
_PREFETCH_FACTOR = 2
# Batches that a consumer may keep without copies: Lightning holds the current, the next and the previous batch, and a
# GPU may still copy from one more.
_SLOTS_OF_CONSUMER = 4


class BatchLoader(DataLoader[Batch], Generic[Batch]):
    """Yields the batches at given indices, in their order.

    Counts unusable audio as batches arrive, that is in one process and in the order of training.

    Args:
        dataset: The dataset, which the workers receive.
        batch_indices: The (step, microbatch) of every batch.
        load: Returns the batch of an index, with its arrays in given memory; a method of the dataset.
        slot_bytes: Memory that the arrays of the largest batch take.
        limits: Tolerance for unusable audio.
        num_workers: Number of loader processes.
        pin_memory: Whether batches are in page-locked memory.
        start_method: How workers are started; by default, as Python does.
        num_slots: Number of batches that the shared memory holds; by default, two for each worker and four more.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_indices: Iterable[BatchIndex | tuple[int, int]],
        *,
        load: "Load[Batch]",
        slot_bytes: int,
        limits: BadAudioConfig,
        num_workers: int = 0,
        pin_memory: bool = False,
        start_method: StartMethod | None = None,
        num_slots: int | None = None,
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            sampler=batch_indices,
            num_workers=num_workers,
            pin_memory=pin_memory,
            multiprocessing_context=start_method if num_workers else None,
        )
        self.bad_cuts = BadAudioCounter("speech", limits.max_share, limits.min_count)
        self.bad_noise = BadAudioCounter("noise", limits.max_noise_share, limits.min_count)
        self.num_slots = _PREFETCH_FACTOR * num_workers + _SLOTS_OF_CONSUMER if num_slots is None else num_slots
        self._load = load
        self._slot_bytes = slot_bytes
        self._ring: SlotRing | None = None

    @property
    def shared_bytes(self) -> int:
        """Size of the memory that is shared with workers, in bytes; pages are used from the first batch on them."""
        return self.num_slots * self._slot_bytes if self.num_workers else 0

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # a generator is sufficient here
        for batch in self._from_workers() if self.num_workers else self._from_this_process():
            self.bad_cuts.add(len(batch.sample_id) + len(batch.bad_cuts), batch.bad_cuts)
            for mix in batch.mixes:
                self.bad_noise.add(mix.num_reads, mix.bad_noise)
            yield batch

    def _from_this_process(self) -> Iterator[Batch]:
        return iter(
            DataLoader(
                _BatchSource(self._load, None),
                batch_size=None,
                sampler=_SlotSampler(self.sampler, None),
                collate_fn=_unchanged,
                pin_memory=self.pin_memory,
            )
        )

    def _from_workers(self) -> Iterator[Batch]:
        ring = (self._ring or self._new_ring()) if self.num_slots else None
        self._ring = None
        sampler = _SlotSampler(self.sampler, ring)
        workers = DataLoader(
            _BatchSource(self._load, ring),
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            prefetch_factor=_PREFETCH_FACTOR,
            collate_fn=_unchanged,
            worker_init_fn=_StartWorker(self.num_workers, nestguard.current().slot),
            multiprocessing_context=self.multiprocessing_context,
        )
        try:
            for handed_over in workers:
                if ring is not None and isinstance(handed_over, _FilledSlot):
                    sampler.slots_of_workers.remove(handed_over.slot)
                    yield handed_over.open(ring)
                else:
                    yield handed_over.pin_memory() if self.pin_memory else handed_over
        finally:
            # Lightning takes the last batch and does not ask for another one, so the loop above does not end by itself.
            # If the iteration is given up earlier, a worker may still write to a slot.
            if not sampler.slots_of_workers:
                self._ring = ring

    def _new_ring(self) -> SlotRing:
        ring = SlotRing(self.num_slots, self._slot_bytes)
        if self.pin_memory:
            ring.pin()
        return ring


class _SlotSampler(Sampler[tuple[int, int, int | None]]):
    """Adds to every batch index the slot that its worker fills, when the index is sent to the worker."""

    def __init__(self, batch_indices: Any, ring: SlotRing | None) -> None:
        self.slots_of_workers: set[int] = set()
        """Slots that a worker may still write to."""

        self._batch_indices = batch_indices
        self._ring = ring

    def __iter__(self) -> Iterator[tuple[int, int, int | None]]:
        is_warned = False
        for step, microbatch in self._batch_indices:
            slot = self._ring.acquire() if self._ring else None
            if slot is not None:
                self.slots_of_workers.add(slot)
            elif self._ring and not is_warned:
                is_warned = True
                _log.warning(
                    "All %d slots of shared memory hold batches that are still in use, so further batches are copied. "
                    "Drop batches that are no longer needed, or raise num_slots of the loader.",
                    self._ring.num_slots,
                )
            yield step, microbatch, slot

    def __len__(self) -> int:
        return len(self._batch_indices)


class _BatchSource(Dataset[Any]):
    """Loads batches in the process that needs them or in a worker."""

    def __init__(self, load: "Load[Any]", ring: SlotRing | None) -> None:
        self._load = load
        self._ring = ring

    def __getitem__(self, index: tuple[int, int, int | None]) -> Any:
        step, microbatch, slot = index
        if self._ring is None or slot is None:
            return self._load((step, microbatch), None)
        memory = self._ring.bytes_of(slot)
        return _FilledSlot.of(self._load((step, microbatch), BatchMemory(memory)), slot, memory)


@dataclass(frozen=True)
class _View:
    """A tensor in a slot."""

    first_byte: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _FilledSlot:
    """A batch as it travels from a worker to its rank: the positions of its tensors in the slot, and everything else.

    A tensor that did not fit into the slot travels as it is.
    """

    slot: int
    kind: type[Microbatch]
    fields: dict[str, Any]

    @classmethod
    def of(cls, batch: Microbatch, slot: int, memory: NDArray[np.uint8]) -> "_FilledSlot":
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
        return self.kind(**{name: _opened(value, memory) for name, value in self.fields.items()})


def _opened(value: Any, memory: Tensor) -> Any:
    if not isinstance(value, _View):
        return value
    num_bytes = value.dtype.itemsize * int(np.prod(value.shape))
    return memory[value.first_byte : value.first_byte + num_bytes].view(value.dtype).view(value.shape)


class _StartWorker:
    """Initialises a loader worker: starts its heartbeat, and lets it survive a signal to the whole job for a while.

    After SIGTERM or SIGUSR1, the rank that owns the worker completes its step and still needs the batches for it.
    """

    def __init__(self, num_workers: int, slot: nestguard.HeartbeatSlot | None) -> None:
        self.num_workers = num_workers
        self.slot = slot

    def __call__(self, worker_id: int) -> None:
        nestguard.start_worker(worker_id, self.num_workers, self.slot)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        # A forked worker inherits the handler of its rank; the default action ends the process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_TO_FINISH))


def microbatches(
    plan: BatchPlan, *, rank: int = 0, world_size: int = 1, start_step: int = 0, num_steps: int
) -> list[BatchIndex]:
    """Returns the batch indices of one rank, in order, from any step on.

    Raises:
        ConfigError: The world size does not divide the plan's microbatches per step, or the rank does not exist.
    """
    share = plan.microbatches_of(rank, world_size)
    return [BatchIndex(step, microbatch) for step in range(start_step, start_step + num_steps) for microbatch in share]


def _unchanged(batch: Any) -> Any:
    return batch
