"""Memory of a loader with workers over a long time: the ring of shared memory, and what each process holds itself.

    python benchmarks/bench_ring_memory.py SPEECH.json NOISE.json [--minutes 60] [--workers 2] [--quick]

Prints Markdown. One rank takes a microbatch of 60 s every `--pause` seconds, keeps it until the next one, and starts a
new pass over its batches every five minutes, as an epoch or a validation does, so workers are started again and again.
Memory is read from `/proc` (`RssShmem` for pages of the ring that a process has touched, `RssAnon` for its own memory)
once a minute.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from nestdata import (
    AudioNoiseBatch,
    AudioNoiseDataset,
    BatchLoader,
    BatchPlan,
    Corpus,
    NoiseSampler,
    PlanConfig,
    PrepareConfig,
    SpeakerNoiseMixer,
    microbatches,
    prepare_corpus,
)

BATCH_SECONDS = 60.0
PASS_SECONDS = 300.0
MB = 1e6


class Memory(NamedTuple):
    """Memory in MB at one moment."""

    minute: float
    shared: float
    """Pages of the ring that this process has touched."""

    consumer: float
    """Memory of this process itself."""

    workers: float
    """The largest of the workers."""


def main() -> int:
    """Runs the loader for the time, and prints one row for each tenth of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path, help="manifest of the speech")
    parser.add_argument("noise", type=Path, help="manifest of the noise")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between batches")
    parser.add_argument("--quick", action="store_true", help="three seconds")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    minutes, pause = (0.05, 0.1) if arguments.quick else (arguments.minutes, arguments.pause)
    with tempfile.TemporaryDirectory() as directory:
        dataset = _dataset(arguments.speech, arguments.noise, Path(directory))
        loader = dataset.loader(microbatches(dataset.plan, num_steps=10**6), num_workers=arguments.workers)
        found, num_batches = _observe(loader, minutes, pause)
        _print(found, num_batches, loader.shared_bytes, arguments.workers)
    return 0


def _dataset(speech: Path, noise: Path, directory: Path) -> AudioNoiseDataset:
    prepare_corpus([speech], directory / "speech.corpus", PrepareConfig(min_seconds=1.0, max_seconds=15.0))
    prepare_corpus([noise], directory / "noise.corpus", PrepareConfig(pcm=True))
    corpus, bank = Corpus.open(directory / "speech.corpus"), Corpus.open(directory / "noise.corpus")
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=BATCH_SECONDS, microbatches_per_step=1))
    return AudioNoiseDataset(corpus, plan, NoiseSampler(bank), SpeakerNoiseMixer())


def _observe(loader: BatchLoader[AudioNoiseBatch], minutes: float, pause: float) -> tuple[list[Memory], int]:
    """Takes batches for the time; returns the memory at each tenth of it, and the number of batches."""
    started, found, num_batches = time.monotonic(), [], 0
    batches: Iterator[AudioNoiseBatch] = iter(())
    batch, pass_ends = None, 0.0
    while (elapsed := (time.monotonic() - started) / 60) < minutes:
        if time.monotonic() >= pass_ends:
            batches, pass_ends = iter(loader), time.monotonic() + PASS_SECONDS
        batch = next(batches)  # the batch before is dropped only now
        for signal in (batch.audio, batch.noise, batch.noisy_audio):
            signal.sum()  # touches all pages
        num_batches += 1
        if elapsed >= minutes / 10 * (len(found) + 1):
            workers = [_memory(child.pid or 0, "RssAnon") for child in multiprocessing.active_children()]
            found.append(Memory(elapsed, _memory("self", "RssShmem"), _memory("self", "RssAnon"), max(workers)))
        time.sleep(pause)
    return found, num_batches


def _memory(process: int | str, field: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / MB for line in lines if line.startswith(f"{field}:"))


def _print(found: list[Memory], num_batches: int, planned_bytes: int, workers: int) -> None:
    print(
        f"# Memory of a loader\n\nMade by `benchmarks/bench_ring_memory.py`: {workers} workers, {num_batches} batches "
    )
    print(
        f"of {BATCH_SECONDS:g} s in {found[-1].minute * 10 / len(found):.0f} minutes, torch {torch.__version__}. ",
        end="",
    )
    print(f"The plan says {planned_bytes / MB:.1f} MB for the ring.\n")
    print("| minute | ring, touched by the consumer, MB | consumer's own, MB | largest worker's own, MB |")
    print("|---|---|---|---|")
    for row in found:
        print(f"| {row.minute:.1f} | {row.shared:.1f} | {row.consumer:.1f} | {row.workers:.1f} |")


if __name__ == "__main__":
    sys.exit(main())
