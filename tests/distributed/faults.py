"""Faults of one rank: each is a callback that acts at one microbatch.

The functions in which a rank hangs have unique names, so that tests can find them in stack traces.
"""

import io
import itertools
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray

import nestdata.batch.loader
import nestdata.corpus.corpus
from nestdata import AudioNoiseBatch, AudioNoiseDataset, MicrobatchKey
from nestdata.batch.loader import StartWorker
from nestmodel import Checkpoints, NestModel
from nestmodel.training.data import _EpochSampler
from tests.nestguard.devices import StandIn

HANG_S = 120

DEVICE = StandIn()
"""Stands for the GPU of this rank in a run with `has_device`; its kernels are only those of a fault."""


def record_fault_time() -> None:
    """Writes the current time of the monotonic clock, which all processes of a machine share."""
    Path(os.environ["FAULT_TIME_FILE"]).write_text(str(time.monotonic()))


class Fault(pl.Callback):
    """Causes one fault at one microbatch of this rank.

    Args:
        kind: The fault.
        step: Optimizer step. For the slow phases ("slow validation" and similar), the delay in seconds.
        microbatch: Index within the step.
    """

    def __init__(self, kind: str, step: int, microbatch: int) -> None:
        self.kind, self.index = kind, (step, microbatch)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        assert isinstance(pl_module, NestModel)
        if self.kind == "sleep in loading":
            in_every_loader(hang_loading_at, self.index)
        elif self.kind == "kill a worker that fills a slot":
            in_every_loader(die_in_loading_at, self.index)
        elif self.kind == "end early":
            end_data_at(self.index)
        elif self.kind == "skip a collective":
            skip_all_reduce_of(pl_module, self.index[0])
        elif self.kind in ("SIGTERM in a collective", "late for a collective"):
            delay_all_reduce_of(pl_module, self.index[0], is_signalled=self.kind.startswith("SIG"))
        elif self.kind == "kernel hangs in FORWARD":
            wait_for_device_in_all_reduce()
        elif self.kind == "slow checkpoint":
            slow_down_checkpoints(float(self.index[0]))

    def on_train_batch_start(
        self, trainer: pl.Trainer, _module: pl.LightningModule, batch: AudioNoiseBatch, _index: int
    ) -> None:
        if (batch.key.step, batch.key.microbatch) != self.index:
            return
        record_fault_time()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "kill a worker":
            multiprocessing.active_children()[0].kill()
        elif self.kind == "nan":
            batch.noisy_audio.fill_(torch.nan)
        elif self.kind == "raise":
            raise_for_one_rank(trainer.global_rank)
        elif self.kind == "hold the GIL":
            hold_the_gil()
        elif self.kind == "kill while writing":
            die_while_writing()
        elif self.kind == "SIGTERM while writing":
            be_preempted_while_writing()
        elif self.kind == "full disk":
            fill_the_disk()
        elif self.kind == "kernel hangs in FORWARD":
            DEVICE.launch(hang=True)
        elif self.kind in signal.Signals.__members__:
            os.kill(os.getpid(), getattr(signal, self.kind))

    def on_validation_batch_start(self, *_: Any) -> None:
        if self.kind == "slow validation":
            time.sleep(self.index[0])


class Paced(pl.Callback):
    """Makes every microbatch take a known time, and one phase longer.

    Args:
        slow_phase: "loading", "forward", "backward", or "nothing".
        base_ms: Time of the forward pass.
        extra_ms: Time that is added in the slow phase.
    """

    def __init__(self, slow_phase: str, base_ms: int, extra_ms: int) -> None:
        self.phase, self.base_s, self.extra_s = slow_phase, base_ms / 1000, extra_ms / 1000

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        assert isinstance(pl_module, NestModel)
        forward_s = self.base_s + self.extra_s * (self.phase == "forward")
        pl_module.encoder.register_forward_pre_hook(lambda *_: time.sleep(forward_s))
        load = AudioNoiseDataset.load

        def load_slowly(dataset: AudioNoiseDataset, *arguments: Any, **options: Any) -> AudioNoiseBatch:
            time.sleep(self.extra_s * (self.phase == "loading"))
            return load(dataset, *arguments, **options)

        AudioNoiseDataset.load = load_slowly  # type: ignore[method-assign]

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:  # noqa: ARG002
        if self.phase == "backward":
            loss.register_hook(lambda _: time.sleep(self.extra_s))


def raise_for_one_rank(rank: int) -> None:
    raise RuntimeError(f"an error on rank {rank} only")


def hold_the_gil() -> None:
    sum(itertools.repeat(0, 10**11))  # runs in C only, so that no signal handler is called


def sleep_in_loading() -> None:
    record_fault_time()
    time.sleep(HANG_S)


class FaultyWorker:
    """Starts a loader worker with a fault, which it would not inherit from its rank through a fork server."""

    def __init__(self, options: Any, add_fault: Callable[[tuple[int, int]], None], index: tuple[int, int]) -> None:
        self.options, self.add_fault, self.index = options, add_fault, index

    def __call__(self, worker_id: int) -> None:
        StartWorker(*self.options)(worker_id)
        self.add_fault(self.index)


def in_every_loader(add_fault: Callable[[tuple[int, int]], None], index: tuple[int, int]) -> None:
    """Adds a fault to this process, and to the loader workers that it starts."""
    nestdata.batch.loader.StartWorker = lambda *options: FaultyWorker(options, add_fault, index)  # type: ignore[assignment, misc]
    add_fault(index)


def hang_loading_at(index: tuple[int, int]) -> None:
    def sleep(_out: NDArray[np.float32]) -> None:
        sleep_in_loading()

    act_in_loading_at(index, sleep)


def die_in_loading_at(index: tuple[int, int]) -> None:
    def write_half_and_die(out: NDArray[np.float32]) -> None:
        out[: len(out) // 2] = 1.0
        record_fault_time()
        os.kill(os.getpid(), signal.SIGKILL)

    act_in_loading_at(index, write_half_and_die)


def act_in_loading_at(index: tuple[int, int], act: Callable[[NDArray[np.float32]], None]) -> None:
    """Calls `act` with the memory for the samples of every cut of one microbatch, before the cut is decoded."""
    load_batch, load = AudioNoiseDataset.load, nestdata.corpus.corpus.load_samples
    is_loading = [False]

    def note_and_load(self: AudioNoiseDataset, requested: MicrobatchKey, *options: Any) -> AudioNoiseBatch:
        is_loading[0] = tuple(requested) == index
        return load_batch(self, requested, *options)

    def act_and_load(*arguments: Any, out: NDArray[np.float32], **options: Any) -> NDArray[np.float32]:
        if is_loading[0]:
            act(out)
        return load(*arguments, out=out, **options)

    AudioNoiseDataset.load = note_and_load  # type: ignore[method-assign,assignment]
    nestdata.corpus.corpus.load_samples = act_and_load


def end_data_at(index: tuple[int, int]) -> None:
    indices = _EpochSampler.__iter__

    def end_early(self: _EpochSampler) -> Iterator[MicrobatchKey]:
        for each in indices(self):
            if each == index:
                record_fault_time()
                return
            yield each

    _EpochSampler.__iter__ = end_early  # type: ignore[method-assign]


def skip_all_reduce_of(model: NestModel, step: int) -> None:
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = model._sum_over_ranks

    def skip_or_all_reduce(values: torch.Tensor) -> torch.Tensor:
        if model.trainer.global_step != step:
            return all_reduce(values)
        record_fault_time()
        return values

    model._sum_over_ranks = skip_or_all_reduce  # type: ignore[method-assign]


def delay_all_reduce_of(model: NestModel, step: int, *, is_signalled: bool) -> None:
    """Delays an all-reduce by five seconds, or sends SIGTERM to this rank while it waits in one."""
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = model._sum_over_ranks

    def late_or_signalled(values: torch.Tensor) -> torch.Tensor:
        if model.trainer.global_step != step:
            return all_reduce(values)
        if not is_signalled:
            time.sleep(5)
            return all_reduce(values)
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began = time.monotonic()
        summed = all_reduce(values)
        assert time.monotonic() - began > 1, "the all-reduce ended before the signal arrived"
        return summed

    model._sum_over_ranks = late_or_signalled  # type: ignore[method-assign]


def wait_for_device_in_all_reduce() -> None:
    """Makes the host wait for the stand-in device where it would wait for a GPU: for the sums of the step."""
    all_reduce = torch.distributed.all_reduce

    def wait_and_all_reduce(*arguments: Any, **options: Any) -> Any:
        DEVICE.wait()
        return all_reduce(*arguments, **options)

    torch.distributed.all_reduce = wait_and_all_reduce


def die_while_writing() -> None:
    """Makes this process kill itself when half of the next checkpoint is written."""

    def write_half(checkpoint: dict[str, Any], file: BinaryIO) -> None:
        complete = io.BytesIO()
        save(checkpoint, complete)
        file.write(complete.getvalue()[: complete.tell() // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    save, torch.save = torch.save, write_half


def be_preempted_while_writing() -> None:
    """Makes this process receive SIGTERM while the next checkpoint is written."""

    def signal_and_save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
        torch.save = save
        os.kill(os.getpid(), signal.SIGTERM)
        save(checkpoint, file)

    save, torch.save = torch.save, signal_and_save


def fill_the_disk() -> None:
    """Limits the size of the files that this process writes to less than that of a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))


def slow_down_checkpoints(seconds: float) -> None:
    write = Checkpoints._write

    def write_slowly(*arguments: Any) -> None:
        time.sleep(seconds)
        write(*arguments)

    Checkpoints._write = write_slowly  # type: ignore[method-assign]
