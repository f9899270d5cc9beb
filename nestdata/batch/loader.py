"""`BatchLoader`: batches in order, from this process or from workers that fill them in place in shared memory."""

import atexit
import logging
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, Sampler

import nestguard
from nestdata import fork_server
from nestdata.batch.bad_audio import BadAudioCounter
from nestdata.batch.batch import AudioNoiseBatch
from nestdata.batch.memory import FilledSlot, SlotRing
from nestdata.batch.remote import NUM_AHEAD
from nestdata.batch.worker import END_SIGNAL, StartWorker, check_workers, end_workers, start_fork_server
from nestdata.errors import ConfigError, NestError
from nestdata.options import StartMethod
from nestdata.plan.batch_plan import BatchPlan
from nestdata.plan.microbatch import MicrobatchKey, MicrobatchLike

_log = logging.getLogger(__name__)

# Batches that each worker has in progress or ready.
_PREFETCH_FACTOR = 2
# Batches that a consumer may keep without copies: Lightning holds the current, the next and the previous batch, and a
# GPU may still copy from one more.
_SLOTS_OF_CONSUMER = 4


class BatchLoader(DataLoader[AudioNoiseBatch]):
    """Yields given microbatches, in their order; `AudioNoiseDataset.loader` explains the other options.

    Counts unusable audio as batches arrive, that is in one process and in the order of training.

    Args:
        dataset: The `AudioNoiseDataset`, which the workers receive.
        keys: The (step, microbatch) of every batch.
    """

    def __init__(
        self,
        dataset: Any,
        keys: Iterable[MicrobatchLike],
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        start_method: StartMethod | None = None,
        num_slots: int | None = None,
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            sampler=keys,
            num_workers=num_workers,
            pin_memory=pin_memory,
            multiprocessing_context=start_method if num_workers else None,
        )
        limits = dataset.bad_audio
        self.bad_cuts = BadAudioCounter("speech", limits.max_share, limits.min_count)
        self.bad_noise = BadAudioCounter("noise", limits.max_noise_share, limits.min_count)
        self.num_slots = _PREFETCH_FACTOR * num_workers + _SLOTS_OF_CONSUMER if num_slots is None else num_slots
        self._start_method = start_method
        self._slot_bytes = dataset.bytes_of_largest_batch
        self._num_ahead = 0 if dataset.remote is None else NUM_AHEAD
        self._ring: SlotRing | None = None

    def __iter__(self) -> Iterator[AudioNoiseBatch]:  # type: ignore[override]  # a generator is sufficient here
        for batch in self._from_workers() if self.num_workers else self._from_this_process():
            self.bad_cuts.add(len(batch.sample_id) + len(batch.bad_cuts), batch.bad_cuts)
            for mix in batch.mixes:
                self.bad_noise.add(mix.num_reads, mix.bad_noise)
            yield batch

    def _from_this_process(self) -> Iterator[AudioNoiseBatch]:
        return iter(
            DataLoader(
                _BatchSource(self.dataset, None),
                batch_size=None,
                sampler=_SlotSampler(self.sampler, None, num_ahead=self._num_ahead),
                pin_memory=self.pin_memory,
            )
        )

    def _from_workers(self) -> Iterator[AudioNoiseBatch]:
        ring = (self._ring or self._new_ring()) if self.num_slots else None
        self._ring = None
        sampler = _SlotSampler(self.sampler, ring, num_ahead=self._num_ahead, num_workers=self.num_workers)
        context = self._new_context()
        workers = DataLoader(
            _BatchSource(self.dataset, ring),
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            prefetch_factor=_PREFETCH_FACTOR,
            worker_init_fn=StartWorker(self.num_workers, nestguard.current().slot),
            multiprocessing_context=context,
        )
        with fork_server.blocked({END_SIGNAL}):  # a worker unblocks it when it has its handler
            iterator: Any = iter(workers)
        end = partial(end_workers, iterator._workers)
        # Runs before torch's own exit functions. Each of those waits for a worker, which itself waits for work, and
        # then sends SIGTERM. An error keeps this frame, and with it the workers, until the process exits.
        atexit.register(end)
        try:
            for handed_over in self._checked(iterator, context):
                if ring is not None and isinstance(handed_over, FilledSlot):
                    sampler.slots_of_workers.remove(handed_over.slot)
                    yield handed_over.open(ring)
                else:
                    yield handed_over.pin_memory() if self.pin_memory else handed_over
        except Exception:
            end()
            raise
        finally:
            atexit.unregister(end)
            # Lightning takes the last batch and does not ask for another one, so the loop above does not end by itself.
            # If the iteration is given up earlier, a worker may still write to a slot.
            if not sampler.slots_of_workers:
                self._ring = ring

    def _checked(self, workers: Iterable[Any], context: Any) -> Iterator[Any]:
        """Yields what workers hand over; raises RuntimeError soon after a worker of a fork server has died."""
        server = context if isinstance(context, fork_server.UnnamedContext) else None
        try:
            for number, handed_over in enumerate(workers, 1):
                if server is not None:
                    if number == self.num_workers:
                        server.remove_names()  # every worker has handed over a batch
                    check_workers(server)
                yield handed_over
        except RuntimeError:
            self._check_corpora()
            if server is not None:
                check_workers(server)  # its message says more than torch's
            raise

    def _check_corpora(self) -> None:
        """Opens the corpora again, as a worker does; raises CorpusError if one was removed or cut off meanwhile.

        A worker that reads a memory-mapped file beyond its new end is killed by SIGBUS.
        """
        dataset: Any = self.dataset
        for corpus in (*dataset.corpus.corpora, dataset.noise.corpus):
            if corpus is not None:
                corpus.reopen()

    def _new_context(self) -> Any:
        """Returns the multiprocessing context that starts the workers of one iteration."""
        if self._start_method != "forkserver":
            return self.multiprocessing_context
        start_fork_server()
        return fork_server.UnnamedContext()

    def _new_ring(self) -> SlotRing:
        ring = SlotRing(self.num_slots, self._slot_bytes)
        if self.pin_memory:
            ring.pin()
        return ring


class _Task(NamedTuple):
    """A microbatch to load."""

    key: MicrobatchKey
    slot: int | None
    """Slot that its worker fills, if there is one."""

    upcoming: tuple[MicrobatchKey, ...]
    """The next microbatches of this worker."""


class _SlotSampler(Sampler[_Task]):
    """Adds to every microbatch the slot that its worker fills, and the next microbatches of this worker.

    Args:
        keys: The (step, microbatch) of every batch.
        ring: The slots, if there is shared memory.
        num_ahead: Number of next microbatches of each worker, which are read from `keys` ahead of their batches.
        num_workers: Number of workers, which take the batches in turn.
    """

    def __init__(self, keys: Any, ring: SlotRing | None, *, num_ahead: int = 0, num_workers: int = 0) -> None:
        self.slots_of_workers: set[int] = set()
        """Slots that a worker may still write to."""

        self._keys = keys
        self._ring = ring
        self._num_ahead = num_ahead
        self._num_workers = max(1, num_workers)
        self._has_warned = False

    def __iter__(self) -> Iterator[_Task]:
        keys = map(MicrobatchKey.of, self._keys)
        known = deque(islice(keys, 1 + self._num_ahead * self._num_workers))
        while known:
            key = known.popleft()
            upcoming = tuple(islice(known, self._num_workers - 1, None, self._num_workers))
            yield _Task(key, self._new_slot(), upcoming)
            known.extend(islice(keys, 1))

    def _new_slot(self) -> int | None:
        slot = self._ring.acquire() if self._ring else None
        if slot is not None:
            self.slots_of_workers.add(slot)
        elif self._ring and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "All %d slots of shared memory hold batches that are still in use, so further batches are copied. "
                "Drop batches that are no longer needed, or raise num_slots of the loader.",
                self._ring.num_slots,
            )
        return slot

    def __len__(self) -> int:
        return len(self._keys)


class _BatchSource(Dataset[Any]):
    """Loads batches in the process that needs them or in a worker."""

    def __init__(self, dataset: Any, ring: SlotRing | None) -> None:
        self._dataset = dataset
        self._ring = ring

    def __getitem__(self, task: _Task) -> AudioNoiseBatch | FilledSlot:
        if self._ring is None or task.slot is None:
            batch: AudioNoiseBatch = self._dataset.load(task.key, None, task.upcoming)
            return batch
        memory = self._ring.bytes_of(task.slot)
        return FilledSlot.of(self._dataset.load(task.key, memory, task.upcoming), task.slot, memory)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_source, (bytes(ForkingPickler.dumps(self._dataset)), self._ring)


class _Unreadable:
    """Stands for a dataset that a worker cannot open: it raises the error with the first batch, not before."""

    def __init__(self, error: NestError) -> None:
        self._error = error

    def load(self, *_: Any) -> AudioNoiseBatch:
        raise self._error


def _received_source(dataset: bytes, ring: SlotRing | None) -> _BatchSource:
    """Opens the corpora in a worker."""
    try:
        return _BatchSource(pickle.loads(dataset), ring)
    except NestError as error:
        return _BatchSource(_Unreadable(error), ring)
    except (AttributeError, ImportError) as error:
        advice = "Define transforms in a module that can be imported, not in the program that is started."
        return _BatchSource(_Unreadable(ConfigError(f"a loader process lacks a transform ({error}). {advice}")), ring)


def microbatches(
    plan: BatchPlan, *, rank: int = 0, world_size: int = 1, start_step: int = 0, num_steps: int
) -> list[MicrobatchKey]:
    """Returns the microbatches of one rank, in order, from any step on.

    Raises:
        ConfigError: The world size does not divide the plan's microbatches per step, or the rank does not exist.
    """
    share = plan.microbatches_of(rank, world_size)
    return [
        MicrobatchKey(step, microbatch) for step in range(start_step, start_step + num_steps) for microbatch in share
    ]
