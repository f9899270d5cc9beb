"""Measures how batches reach the consumer: workers against none, and against bare loops.

    python -m benchmarks run handover SPEECH.json NOISE.json [--rounds 5] [--quick]

Prints Markdown. Every round measures each contestant once, and ratios are computed within a round. Each contestant
loads the same speech in microbatches of 240 s, with noise from a bank, one thread per process, and drops its batches.
Bare loops decode the files of one process each with `soundfile.read`; bare sums write the three signals of a batch, so
they show how far the memory lets two processes be faster than one.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import json_of, own_command
from benchmarks.harness.report import Report, machine, versions
from benchmarks.harness.rounds import ratios, run_rounds, spread_cells
from nestdata import (
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    NoiseSampler,
    PlanConfig,
    PrepareConfig,
    SpeakerNoiseMixer,
    microbatches,
    prepare_corpus,
)

QUICK = ["{speech}", "{noise}", "--quick"]
LIMITS = (1.0, 60.0)
BATCH_SECONDS = 240.0
KINDS = ("FLAC", "PCM")
LOOP, SUMS = "bare loop of soundfile", "bare sums of a batch"


def main() -> int:
    """Runs the measurements and prints them."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"rounds": 1, "seconds": 2.0})
    parser.add_argument("speech", type=Path, help="manifest of the speech")
    parser.add_argument("noise", type=Path, help="manifest of the noise")
    parser.add_argument("--seconds", type=float, default=12.0, help="shortest time of one measurement")
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)  # measures one contestant, in a child
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    if arguments.workers is not None:
        print(json.dumps(_measure_here(arguments)))
        return 0
    report = Report(
        "Handing batches over",
        __file__,
        f"{arguments.rounds} rounds, {versions('torch')}, {machine()}. Audio-seconds per second; microbatches of "
        f"{BATCH_SECONDS:g} s.",
        results=arguments.results,
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for kind in KINDS:
            limits = PrepareConfig(min_seconds=LIMITS[0], max_seconds=LIMITS[1], pcm=kind == "PCM")
            prepare_corpus([arguments.speech], directory / f"{kind}.corpus", limits)
        prepare_corpus([arguments.noise], directory / "noise.corpus", PrepareConfig(pcm=True))
        _print(report, run_rounds(_contestants(directory, arguments.seconds), arguments.rounds))
    return 0


def _contestants(directory: Path, seconds: float) -> dict[str, Callable[[], dict[str, float]]]:
    contestants: dict[str, Callable[[], dict[str, float]]] = {}
    corpus = Corpus.open(directory / "FLAC.corpus")
    paths = [str(corpus.line(index)["recording"]["sources"][0]["source"]) for index in range(len(corpus))]
    total = corpus.hours * 3600
    for processes in (1, 2):
        contestants[f"{LOOP}, {processes} processes"] = partial(_loops, paths, total, processes)
        contestants[f"{SUMS}, {processes} processes"] = partial(_sums, processes)
    for kind, workers in product(KINDS, (0, 1, 2)):
        corpora = (directory / f"{kind}.corpus", directory / "noise.corpus")
        options = ["--workers", workers, "--seconds", seconds]
        command = own_command(__file__, *corpora, *options)
        label = f"ours, {kind}, {workers} workers"
        contestants[label] = partial(json_of, command, OMP_NUM_THREADS="1")
    return contestants


def _measure_here(arguments: argparse.Namespace) -> dict[str, float]:
    corpus = Corpus.open(arguments.speech)
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=BATCH_SECONDS, microbatches_per_step=1))
    dataset = AudioNoiseDataset(corpus, plan, NoiseSampler(Corpus.open(arguments.noise)), SpeakerNoiseMixer())
    return _deliver(dataset, arguments.workers, arguments.seconds)


def _deliver(dataset: AudioNoiseDataset, workers: int, seconds: float) -> dict[str, float]:
    """Loads batches for a time, from the first batch on, so that the start of the workers does not count."""
    batch_indices = microbatches(dataset.plan, num_steps=10**6)
    loader = iter(dataset.loader(batch_indices, num_workers=workers))
    next(loader)
    loaded, batches, started, cpu = 0, 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - started) < seconds:
        loaded += int(next(loader).audio_len.sum())
        batches += 1
    cpu = time.process_time() - cpu
    del loader
    return {"speed": loaded / dataset.plan.sampling_rate / elapsed, "cpu_ms": 1000 * cpu / batches}


def _loops(paths: list[str], seconds: float, processes: int) -> dict[str, float]:
    """Decodes all files, divided over processes that start together."""
    return {"speed": seconds / _time_of([partial(_loop, paths[rank::processes]) for rank in range(processes)])}


def _loop(paths: list[str]) -> None:
    for path in paths:
        soundfile.read(path, dtype="float32")


def _sums(processes: int, num_batches: int = 400) -> dict[str, float]:
    """Writes the clean, the added and the noisy signal of batches, in processes that start together."""
    seconds = _time_of([partial(_sum_batches, num_batches)] * processes)
    return {"speed": processes * num_batches * BATCH_SECONDS / seconds}


def _sum_batches(num_batches: int) -> None:
    source = np.ones(int(BATCH_SECONDS * 16000), np.float32)
    clean, added, noisy = (np.empty_like(source) for _ in range(3))
    for _ in range(num_batches):
        np.copyto(clean, source)
        np.copyto(added, source)
        np.add(clean, added, out=noisy)


def _time_of(works: list[Callable[[], None]]) -> float:
    """Returns the seconds until all works are done, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(works) + 1)
    children = [context.Process(target=_run, args=(work, barrier)) for work in works]
    for child in children:
        child.start()
    barrier.wait()
    started = time.perf_counter()
    for child in children:
        child.join()
    return time.perf_counter() - started


def _run(work: Callable[[], None], barrier: Any) -> None:
    barrier.wait()
    work()


def _print(report: Report, rounds: list[dict[str, dict[str, float]]]) -> None:
    rows = []
    for name in rounds[0]:
        cpu_ms = [measured[name]["cpu_ms"] for measured in rounds if "cpu_ms" in measured[name]]
        speeds = spread_cells([measured[name]["speed"] for measured in rounds], ".0f")
        rows.append([name, *speeds, f"{statistics.median(cpu_ms):.2f}" if cpu_ms else ""])
    figures = ("median", "minimum", "maximum")
    report.table(["contestant, speed", *figures, "CPU of the consumer per batch, ms"], rows)
    speeds_of = [{name: found["speed"] for name, found in measured.items()} for measured in rounds]
    pairs = _pairs(list(rounds[0]))
    report.table(["ratio", *figures], ([f"{a} / {b}", *spread_cells(ratios(speeds_of, a, b))] for a, b in pairs))


def _pairs(names: list[str]) -> list[tuple[str, str]]:
    pairs = [(f"{what}, 2 processes", f"{what}, 1 processes") for what in (LOOP, SUMS)]
    for name in names:
        rest, _, last = name.rpartition(", ")
        if last == "1 workers":
            pairs.append((name, f"{rest}, 0 workers"))
        if last == "2 workers":
            pairs.append((name, f"{rest}, 1 workers"))
        if rest.startswith("ours, FLAC") and last != "0 workers":
            pairs.append((name, f"{LOOP}, {last.split()[0]} processes"))
    return pairs


if __name__ == "__main__":
    sys.exit(main())
