"""What the loader delivers and what steps take, measured with the data and the settings of the run.

Rates are seconds of audio per second, padding included, of one rank.
"""

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, takewhile
from threading import Event
from typing import Any

import pytorch_lightning as pl
import torch

from nestdata import BatchIndex, BatchLoader, time_decoding
from nestmodel.preflight.measure.trial_step import clean_up, make_trial_step
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel

MARGIN = 1.2
"""Workers feed a step if they deliver this many times what it takes, because lengths, noise and other load vary."""

_NUM_STEP_BATCHES = 2
_MIN_ROUNDS = 2
"""Smallest number of batches per worker that are measured: batches arrive in bursts of one per worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedingMeasurement:
    """The measurements of one rank."""

    delivered: Mapping[int, float]
    """Rate of the loader by number of workers, with an entry for at least the configured number."""

    step_rate: float
    """Rate at which steps take audio if the batches are already loaded."""

    num_workers: int
    """The configured number of workers."""

    num_cores: int
    """Cores of this rank."""

    decode_s: float
    """CPU time to load a second of speech as it is stored, in seconds."""

    bank_s: float
    """CPU time to load a second of speech from 16-bit samples, in seconds."""

    stored_bytes: float
    """Bytes of a second of speech as it is stored."""

    bank_bytes: float
    """Bytes of a second of speech as 16-bit samples."""

    hours_without_bank: float
    """Hours of speech in corpora that were prepared without `--pcm`."""


def own_cores() -> tuple[str, list[int]]:
    """Returns the name of this machine and the cores that this process may use."""
    try:
        cores = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = list(range(os.cpu_count() or 1))
    return platform.node(), cores


def cores_of_rank(cores_of_ranks: Sequence[Any], rank: int) -> int:
    """Returns the number of cores that a rank has when ranks share the cores that several of them may use.

    Args:
        cores_of_ranks: The result of `own_cores` on each rank; None for a rank that did not answer.
        rank: Number of a rank that answered.
    """
    node, own = cores_of_ranks[rank]
    on_node = [set(each[1]) for each in cores_of_ranks if each is not None and each[0] == node]
    # Exact fractions: six times a third is slightly less than 2 in floating point.
    return max(1, int(sum(Fraction(1, sum(core in cores for cores in on_node)) for core in own)))


def on_gpu(trainer: pl.Trainer) -> bool:
    """Returns whether this rank trains on an NVIDIA GPU, for which batches are in page-locked memory."""
    return bool(trainer.strategy.root_device.type == "cuda")


def measure_feeding(
    model: NestModel, data: NestDataModule, trainer: pl.Trainer, num_cores: int, measure_s: float
) -> FeedingMeasurement:
    """Measures what the loader delivers with different numbers of workers, and what steps take.

    Args:
        model: The model of the run; it is not changed.
        data: The data of the run.
        trainer: The trainer, configured as for the run.
        num_cores: Cores of this rank.
        measure_s: How long each number of workers is measured, in seconds.
    """
    dataset = data.train_dataset
    with clean_up(trainer.strategy.root_device):
        step_rate = _measure_step_rate(model, data, trainer)
    delivered = _measure_loader(data, trainer, step_rate, num_cores, measure_s)
    indices = [int(index) for step in range(2) for index in dataset.plan.indices(step, 0)]
    decoding = time_decoding(dataset.corpus, indices, measure_s)
    return FeedingMeasurement(
        delivered=delivered,
        step_rate=step_rate,
        num_workers=data.num_workers,
        num_cores=num_cores,
        decode_s=decoding.load_s / decoding.audio_s,
        bank_s=decoding.bank_s / decoding.audio_s,
        stored_bytes=decoding.stored_bytes / decoding.audio_s,
        bank_bytes=decoding.bank_bytes / decoding.audio_s,
        hours_without_bank=sum((corpus.hours for corpus in dataset.corpus.corpora if not corpus.has_bank), 0.0),
    )


def _measure_step_rate(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> float:
    """Returns the audio-seconds a second that steps of this rank take, from batches that are ready."""
    dataset = data.train_dataset
    own = dataset.plan.microbatches_of(trainer.global_rank, trainer.world_size)
    batches = [dataset.load((step, own[0])) for step in range(_NUM_STEP_BATCHES)]
    step = make_trial_step(model, data, trainer)
    for batch in batches:
        step(batch)
    seconds = sum(step(batch).seconds_per_microbatch(len(own)) for batch in batches)
    return sum(batch.audio.numel() for batch in batches) / data.sampling_rate / seconds


def _measure_loader(
    data: NestDataModule, trainer: pl.Trainer, step_rate: float, num_cores: int, measure_s: float
) -> dict[int, float]:
    """Returns the audio-seconds a second that the loader delivers, by number of workers.

    More workers are tried until the step is fed. Each number reads batches that the ones before did not read, so that
    the page cache helps none of them more than others, unless the corpus is small.
    """
    indices = _own_indices(data, trainer)
    delivered = {}
    doubled = [number for number in (0, 1, *(1 << i for i in range(1, 10))) if number < num_cores]
    for number in dict.fromkeys([*doubled, num_cores]):
        delivered[number] = _delivered(data, trainer, indices, number, measure_s)
        if number and delivered[number] >= MARGIN * step_rate:
            break
    if data.num_workers not in delivered:
        delivered[data.num_workers] = _delivered(data, trainer, indices, data.num_workers, measure_s)
    return delivered


def _own_indices(data: NestDataModule, trainer: pl.Trainer) -> Iterator[BatchIndex]:
    """Yields the batch indices of this rank from step 0 on, without an end."""
    own = data.train_dataset.plan.microbatches_of(trainer.global_rank, trainer.world_size)
    return (BatchIndex(step, microbatch) for step in count() for microbatch in own)


def _delivered(
    data: NestDataModule, trainer: pl.Trainer, indices: Iterator[BatchIndex], num_workers: int, measure_s: float
) -> float:
    """Returns the audio-seconds a second that arrive from a loader after the start of its workers."""
    is_over = Event()
    until_over = takewhile(lambda _: not is_over.is_set(), indices)  # so that the loader ends in the usual way
    loader: BatchLoader = data.loader_of(
        data.train_dataset, until_over, on_gpu=on_gpu(trainer), num_workers=num_workers
    )
    processes = max(1, num_workers)
    num_warm_up, num_samples, started, ended = 2 * processes, 0, 0.0, 0.0
    with torch.random.fork_rng(devices=[]):  # torch's loader draws a seed from the global generator
        for number, batch in enumerate(loader, start=1):
            if is_over.is_set():
                continue  # batches that were already being prepared
            if number > num_warm_up:
                num_samples += batch.audio.numel()
                ended = time.perf_counter()
                enough = number >= num_warm_up + _MIN_ROUNDS * processes
                if enough and ended - started >= measure_s:
                    is_over.set()
            else:
                started = time.perf_counter()
    return num_samples / data.sampling_rate / (ended - started)
