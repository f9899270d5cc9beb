"""What can go wrong on one rank: each fault is a callback that strikes at one microbatch.

The functions that a rank is found in have names that nothing else has, so that a stack can be searched for them.
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

import nestdata.corpus.corpus
from nestdata import AudioNoiseBatch, AudioNoiseDataset
from nestmodel import Checkpoints, NestModel
from nestmodel.training.data import _EpochSampler

FOREVER_S = 120


def strikes() -> None:
    """Notes when, by the clock that all processes of a machine share."""
    Path(os.environ["FAULT_STRUCK"]).write_text(str(time.monotonic()))


class Fault(pl.Callback):
    """Does one thing at one microbatch of this rank."""

    def __init__(self, kind: str, step: int, microbatch: int) -> None:
        self.kind, self.place = kind, (step, microbatch)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        assert isinstance(pl_module, NestModel)
        if self.kind == "sleep in loading":
            sleep_at(self.place)
        elif self.kind == "end early":
            end_at(self.place)
        elif self.kind == "skip a collective":
            skip_sum_of(pl_module, self.place[0])
        elif self.kind in ("SIGTERM in a collective", "late for a collective"):
            disturb_sum_of(pl_module, self.place[0], is_signalled=self.kind.startswith("SIG"))
        elif self.kind == "slow checkpoint":
            slow_down_checkpoints(float(self.place[0]))

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: AudioNoiseBatch, _index: int
    ) -> None:
        if (batch.key.step, batch.key.microbatch) != self.place:
            return
        strikes()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "kill a worker":
            multiprocessing.active_children()[0].kill()
        elif self.kind == "nan":
            batch.noisy_audio.fill_(torch.nan)
        elif self.kind == "raise":
            raise_for_one_rank(trainer.global_rank)
        elif self.kind == "sleep in the encoder":
            assert isinstance(module, NestModel)
            module.encoder.register_forward_pre_hook(sleep_in_encoder)
        elif self.kind == "hold the GIL":
            hold_the_gil()
        elif self.kind == "kill while writing":
            die_while_writing()
        elif self.kind == "full disk":
            fill_the_disk()
        elif self.kind == "clock jump":
            Path(os.environ["CLOCK_JUMPS_WITH"]).touch()
            time.sleep(2)  # so that every look of the monitor falls between two beats of this rank
        elif self.kind in signal.Signals.__members__:
            os.kill(os.getpid(), getattr(signal, self.kind))

    def on_validation_batch_start(self, *_: Any) -> None:
        if self.kind == "slow validation":
            time.sleep(self.place[0])

    def on_train_start(self, *_: Any) -> None:
        if self.kind == "slow first step":
            time.sleep(self.place[0])


def raise_for_one_rank(rank: int) -> None:
    raise RuntimeError(f"something that happens on rank {rank} only")


def sleep_in_encoder(*_: object) -> None:
    time.sleep(FOREVER_S)


def hold_the_gil() -> None:
    sum(itertools.repeat(0, 10**11))  # in C all the while, where no handler of a signal is called


def sleep_in_loading() -> None:
    strikes()
    time.sleep(FOREVER_S)


def sleep_at(place: tuple[int, int]) -> None:
    get, load = AudioNoiseDataset.__getitem__, nestdata.corpus.corpus.load_samples
    is_there = [False]

    def get_noting(self: AudioNoiseDataset, asked: tuple[int, int]) -> AudioNoiseBatch:
        is_there[0] = asked == place
        return get(self, asked)

    def load_or_sleep(*arguments: Any, **options: Any) -> NDArray[np.float32]:
        if is_there[0]:
            sleep_in_loading()
        return load(*arguments, **options)

    AudioNoiseDataset.__getitem__ = get_noting  # type: ignore[method-assign]
    nestdata.corpus.corpus.load_samples = load_or_sleep


def end_at(place: tuple[int, int]) -> None:
    places = _EpochSampler.__iter__

    def ending(self: _EpochSampler) -> Iterator[tuple[int, int]]:
        for one in places(self):
            if one == place:
                strikes()
                return
            yield one

    _EpochSampler.__iter__ = ending  # type: ignore[method-assign]


def skip_sum_of(model: NestModel, step: int) -> None:
    add_up: Callable[[torch.Tensor], torch.Tensor] = model._sum_over_ranks

    def skip_or_add_up(values: torch.Tensor) -> torch.Tensor:
        if model.trainer.global_step != step:
            return add_up(values)
        strikes()
        return values

    model._sum_over_ranks = skip_or_add_up  # type: ignore[method-assign]


def disturb_sum_of(model: NestModel, step: int, *, is_signalled: bool) -> None:
    """One rank is five seconds late; one is told to leave while it waits for that one."""
    add_up: Callable[[torch.Tensor], torch.Tensor] = model._sum_over_ranks

    def late_or_signalled(values: torch.Tensor) -> torch.Tensor:
        if model.trainer.global_step != step:
            return add_up(values)
        if not is_signalled:
            time.sleep(5)
            return add_up(values)
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began = time.monotonic()
        added = add_up(values)
        assert time.monotonic() - began > 1, "the collective was over before the signal came"
        return added

    model._sum_over_ranks = late_or_signalled  # type: ignore[method-assign]


def die_while_writing() -> None:
    """The next checkpoint is half written when this process is killed."""

    def write_half(checkpoint: object, file: BinaryIO) -> None:
        whole = io.BytesIO()
        save(checkpoint, whole)
        file.write(whole.getvalue()[: whole.tell() // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    save, torch.save = torch.save, write_half


def fill_the_disk() -> None:
    """From here on, no file of this process can be as large as a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))


def slow_down_checkpoints(seconds: float) -> None:
    write = Checkpoints._write

    def write_slowly(self: Checkpoints, trainer: pl.Trainer, step: int) -> None:
        time.sleep(seconds)
        write(self, trainer, step)

    Checkpoints._write = write_slowly  # type: ignore[method-assign]
