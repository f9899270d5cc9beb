"""`BatchLoader`: batches in order, from this process or from workers that fill them in place in shared memory."""

import atexit
import logging
import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import nestguard
from nestdata import fork_server
from nestdata.batch.bad_audio import BadAudioCounter
from nestdata.batch.batch import AudioNoiseBatch, SlotRing, tensors_on
from nestdata.batch.remote import NUM_AHEAD
from nestdata.errors import ConfigError, NestError
from nestdata.options import StartMethod
from nestdata.plan.batch_plan import BatchPlan
from nestdata.plan.microbatch import MicrobatchKey, MicrobatchLike
from nestdata.storage import StoreEnvironment

_log = logging.getLogger(__name__)

# Batches that each worker has in progress or ready.
_PREFETCH_FACTOR = 2
# Batches that a consumer may keep without copies: Lightning holds the current, the next and the previous batch, and a
# GPU may still copy from one more.
_SLOTS_OF_CONSUMER = 4
# Ends a loader worker at once, with code 0: torch raises an error in its owner if it ends in another way.
_END_SIGNAL = signal.SIGUSR2
# Time after SIGTERM at which an alarm ends a loader worker that is still running.
_SECONDS_TO_FINISH = 60
# Modules that a loader worker needs for its first batch, which the fork server imports for all workers.
_NEEDED_BY_WORKERS = ("nestdata.batch.dataset", "nestdata.filters", "soundfile", "miniaudio")

_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "It usually means that memory ran out: use fewer workers.",
    signal.SIGBUS: "It means that a memory-mapped file was cut off, or that shared memory (/dev/shm) is full: use "
    "fewer workers, or give the container more (--shm-size).",
}
"""Meaning of the signal that killed a worker."""


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
        if pin_memory and not torch.cuda.is_available():
            _log.warning("pin_memory has no effect, because there is no GPU.")
            pin_memory = False
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
        dataset: Any = self.dataset
        for task in _SlotSampler(self.sampler, None, num_ahead=self._num_ahead):
            yield self._pinned(dataset.load(task.key, None, task.upcoming))

    def _pinned(self, batch: AudioNoiseBatch) -> AudioNoiseBatch:
        return batch.pin_memory() if self.pin_memory else batch

    def _from_workers(self) -> Iterator[AudioNoiseBatch]:
        ring, self._ring = self._ring, None
        if ring is None and self.num_slots:
            ring = SlotRing(self.num_slots, self._slot_bytes)
            if self.pin_memory:
                ring.pin()
        sampler = _SlotSampler(self.sampler, ring, num_ahead=self._num_ahead, num_workers=self.num_workers)
        context: Any = self.multiprocessing_context
        if self._start_method == "forkserver":
            start_fork_server()
            context = fork_server.UnnamedContext()
        workers = DataLoader(
            _BatchSource(self.dataset, ring),
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            prefetch_factor=_PREFETCH_FACTOR,
            worker_init_fn=StartWorker(self.num_workers, nestguard.current().slot),
            multiprocessing_context=context,
            generator=torch.Generator(),  # not the one of the process, which the consumer may use
        )
        with fork_server.blocked({_END_SIGNAL}):  # a worker unblocks it when it has its handler
            iterator: Any = iter(workers)
        end = partial(_end_workers, iterator._workers)
        # Runs before torch's own exit functions. Each of those waits for a worker, which itself waits for work, and
        # then sends SIGTERM. An error keeps this frame, and with it the workers, until the process exits.
        atexit.register(end)
        try:
            for handed_over in self._checked(iterator, context):
                if ring is not None and isinstance(handed_over, _FilledSlot):
                    sampler.slots_of_workers.remove(handed_over.slot)
                    yield handed_over.open(ring)
                else:
                    yield self._pinned(handed_over)
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
                    _check_workers(server)
                yield handed_over
        except RuntimeError:
            self._check_corpora()
            if server is not None:
                _check_workers(server)  # its message says more than torch's
            raise

    def _check_corpora(self) -> None:
        """Opens the corpora again, as a worker does; raises CorpusError if one was removed or cut off meanwhile.

        A worker that reads a memory-mapped file beyond its new end is killed by SIGBUS.
        """
        dataset: Any = self.dataset
        for corpus in (*dataset.corpus.corpora, dataset.noise.corpus):
            if corpus is not None:
                corpus.reopen()


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


@dataclass(frozen=True)
class _FilledSlot:
    """A batch as a worker sends it to its rank: the slot with its tensors, and everything else."""

    slot: int
    shape: tuple[int, int]
    metadata: dict[str, Any]

    def open(self, ring: SlotRing) -> AudioNoiseBatch:
        """Returns the batch with tensors on the memory of its slot."""
        return AudioNoiseBatch(**tensors_on(ring.tensor(self.slot), *self.shape), **self.metadata)


class _BatchSource(Dataset[Any]):
    """Loads batches in a worker."""

    def __init__(self, dataset: Any, ring: SlotRing | None, error: NestError | None = None) -> None:
        self._dataset = dataset
        self._ring = ring
        self._error = error

    def __getitem__(self, task: _Task) -> AudioNoiseBatch | _FilledSlot:
        if self._error:
            raise self._error
        memory = None if self._ring is None or task.slot is None else self._ring.bytes_of(task.slot)
        batch: AudioNoiseBatch = self._dataset.load(task.key, memory, task.upcoming)
        if memory is None or task.slot is None:
            return batch
        num_cuts, num_samples = batch.audio.shape
        arrays = tensors_on(memory, num_cuts, num_samples).items()
        if elsewhere := [name for name, array in arrays if getattr(batch, name).data_ptr() != array.ctypes.data]:
            raise ValueError(
                f"the data set gave a batch whose {', '.join(elsewhere)} is not in the memory that `load` was given. "
                "Write into the tensors of the batch instead of replacing them."
            )
        return _FilledSlot(task.slot, (num_cuts, num_samples), batch.metadata())

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_source, (bytes(ForkingPickler.dumps(self._dataset)), self._ring)


def _received_source(dataset: bytes, ring: SlotRing | None) -> _BatchSource:
    """Opens the corpora in a worker. An error is raised with the first batch, not before."""
    try:
        return _BatchSource(pickle.loads(dataset), ring)
    except NestError as error:
        return _BatchSource(None, ring, error)
    except (AttributeError, ImportError) as error:
        advice = "Define transforms in a module that can be imported, not in the program that is started."
        return _BatchSource(None, ring, ConfigError(f"a loader process lacks a transform ({error}). {advice}"))


class StartWorker:
    """Initialises a loader worker; torch's loader calls it first.

    Sets the environment variables of object stores, starts the heartbeat, and lets the worker survive a signal to the
    whole job for a while: after SIGTERM or SIGUSR1, the rank that owns the worker completes its step and still needs
    the batches for it.
    """

    def __init__(self, num_workers: int, slot: nestguard.HeartbeatSlot | None) -> None:
        self.num_workers = num_workers
        self.slot = slot
        self.environment = StoreEnvironment()

    def __call__(self, worker_id: int) -> None:
        """Initialises the worker in which it runs; `worker_id` counts from 0."""
        self.environment.apply()
        nestguard.start_worker(worker_id, self.num_workers, self.slot)
        for number in (signal.SIGUSR1, signal.SIGINT):  # the rank handles Ctrl-C for its workers
            signal.signal(number, signal.SIG_IGN)
        # A forked worker inherits the handler of its rank; the default action ends the process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(_END_SIGNAL, lambda *_: os._exit(0))
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_TO_FINISH))
        # Blocked by the fork server.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1, _END_SIGNAL})
        owner = multiprocessing.parent_process()
        if owner is not None and owner.pid != os.getppid():
            fork_server.end_with_parent()


def _end_workers(workers: Iterable[BaseProcess]) -> None:
    """Immediately ends workers whose batches are not needed; after SIGTERM, they would run for up to a minute."""
    for worker in workers:
        if worker.is_alive() and worker.pid is not None:
            os.kill(worker.pid, _END_SIGNAL)


def _check_workers(server: fork_server.UnnamedContext) -> None:
    """Raises RuntimeError if a worker was killed or has failed."""
    worker = server.failed_process()
    code = worker.exitcode if worker else None
    if worker and code:
        meaning = _MEANINGS.get(-code, "What it printed on stderr says why.")
        raise RuntimeError(f"worker {worker.name} (pid {worker.pid}) {nestguard.describe_exit(code)}. {meaning}")


def start_fork_server(*, imports_main: bool = True) -> None:
    """Starts the process from which loaders with the start method "forkserver" fork their workers.

    Does nothing if it runs already. Otherwise, a loader starts it with its first workers, which then wait until it has
    imported torch. If it is started earlier, it imports torch while the rank does something else.

    Args:
        imports_main: Whether workers import the main module of the program, as Python does by default. With False, the
            program needs no `if __name__ == "__main__":`, but batches must not need anything that its main module
            defines. Once False, it stays False for this process.
    """
    fork_server.start(_NEEDED_BY_WORKERS, imports_main=imports_main)


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
