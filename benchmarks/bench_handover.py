"""Measures how batches reach the consumer: workers against none, against bare loops, and against another commit.

    python benchmarks/bench_handover.py SPEECH.json NOISE.json [--before CHECKOUT] [--rounds 5] [--quick]

Prints Markdown. Every round measures each contestant once, and ratios are computed within a round. Each contestant
loads the same speech in microbatches of 240 s, with noise from a bank, one thread per process, and drops its batches.
Bare loops decode the files of one process each with `soundfile.read`; bare sums write the three signals of a batch, so
they show how far the memory lets two processes be faster than one. CHECKOUT is a work tree of another commit, which
prepares the same manifests itself and is measured by the same code, in a process of its own.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from peer import run_peer

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

LIMITS = (1.0, 60.0)
BATCH_SECONDS = 240.0
KINDS = ("FLAC", "PCM")
LOOP, SUMS = "bare loop of soundfile", "bare sums of a batch"


def main() -> int:
    """Runs the measurements and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path, help="manifest of the speech")
    parser.add_argument("noise", type=Path, help="manifest of the noise")
    parser.add_argument("--before", type=Path, help="work tree of the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0, help="shortest time of one measurement")
    parser.add_argument("--quick", action="store_true", help="one round of two seconds each")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help=argparse.SUPPRESS)  # prepares corpora, in a child
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)  # measures one contestant, in a child
    parser.add_argument("--packed", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    if arguments.prepare is not None:
        _prepare_here(arguments)
        return 0
    if arguments.workers is not None:
        print(json.dumps(_measure_here(arguments)))
        return 0
    rounds, seconds = (1, 2.0) if arguments.quick else (arguments.rounds, arguments.seconds)
    with tempfile.TemporaryDirectory() as directory:
        trees = {"ours": Path(__file__).resolve().parents[1]}
        if arguments.before:
            trees["before"] = arguments.before.resolve()
        manifests = (arguments.speech.resolve(), arguments.noise.resolve())
        for name, tree in trees.items():
            _run_in(tree, *manifests, "--prepare", str(Path(directory) / name))
        contestants = _contestants(trees, Path(directory), seconds)
        measured: list[dict[str, dict[str, float]]] = []
        for number in range(-1, rounds):  # the first round fills caches and is discarded
            measured.append({name: measure() for name, measure in contestants.items()})
            print(f"round {number}: {measured[-1]}", file=sys.stderr)
    _print(measured[1:])
    return 0


def _prepare_here(arguments: argparse.Namespace) -> None:
    """Prepares the corpora with the code of one work tree, since an earlier commit cannot open those of a later one."""
    arguments.prepare.mkdir()
    for kind in KINDS:
        limits = PrepareConfig(min_seconds=LIMITS[0], max_seconds=LIMITS[1], pcm=kind == "PCM")
        prepare_corpus([arguments.speech], arguments.prepare / f"{kind}.corpus", limits)
    prepare_corpus([arguments.noise], arguments.prepare / "noise.corpus", PrepareConfig(pcm=True))


def _contestants(trees: dict[str, Path], directory: Path, seconds: float) -> dict[str, Callable[[], dict[str, float]]]:
    contestants: dict[str, Callable[[], dict[str, float]]] = {}
    corpus = Corpus.open(directory / "ours" / "FLAC.corpus")
    paths = [str(corpus.line(index)["recording"]["sources"][0]["source"]) for index in range(len(corpus))]
    total = corpus.hours * 3600
    for processes in (1, 2):
        contestants[f"{LOOP}, {processes} processes"] = partial(_loops, paths, total, processes)
        contestants[f"{SUMS}, {processes} processes"] = partial(_sums, processes)
    for name, tree in trees.items():
        for kind in KINDS:
            for packed in (False, True) if name == "ours" else (False,):
                for workers in (0, 1, 2) if name == "ours" else (2,):
                    label = f"{name}, {kind}{', packed' if packed else ''}, {workers} workers"
                    contestants[label] = partial(
                        _measure, tree, directory / name, kind, seconds, workers, packed=packed
                    )
    return contestants


def _measure(tree: Path, corpora: Path, kind: str, seconds: float, workers: int, *, packed: bool) -> dict[str, float]:
    """Measures one dataset of one work tree in a process of its own."""
    options = ["--workers", str(workers), "--seconds", str(seconds)] + (["--packed"] if packed else [])
    printed = _run_in(tree, corpora / f"{kind}.corpus", corpora / "noise.corpus", *options)
    found: dict[str, float] = json.loads(printed)
    return found


def _run_in(tree: Path, speech: Path, noise: Path, *options: str) -> str:
    """Runs this script with the packages of a work tree."""
    command = [sys.executable, Path(__file__).resolve(), speech, noise, *options]
    return run_peer(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"})


def _measure_here(arguments: argparse.Namespace) -> dict[str, float]:
    corpus = Corpus.open(arguments.speech)
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=BATCH_SECONDS, microbatches_per_step=1))
    dataset = AudioNoiseDataset(corpus, plan, NoiseSampler(Corpus.open(arguments.noise)), SpeakerNoiseMixer())
    options = {"packed": True} if arguments.packed else {}  # an earlier commit does not know the option
    return _deliver(dataset, arguments.workers, arguments.seconds, **options)


def _deliver(dataset: AudioNoiseDataset, workers: int, seconds: float, **options: Any) -> dict[str, float]:
    """Loads batches for a time, from the first batch on, so that the start of the workers does not count."""
    batch_indices = microbatches(dataset.plan, num_steps=10**6)
    loader = iter(dataset.loader(batch_indices, num_workers=workers, **options))
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


def _print(rounds: list[dict[str, dict[str, float]]]) -> None:
    print(f"# Handing batches over\n\nMade by `benchmarks/bench_handover.py`, {len(rounds)} rounds, torch ", end="")
    print(f"{torch.__version__}. Audio-seconds per second; microbatches of {BATCH_SECONDS:g} s.\n")
    print("| contestant | speed, median | minimum | maximum | CPU of the consumer per batch, ms |")
    print("|---|---|---|---|---|")
    for name in rounds[0]:
        speeds = [measured[name]["speed"] for measured in rounds]
        cpu = [measured[name]["cpu_ms"] for measured in rounds if "cpu_ms" in measured[name]]
        shown = f"{statistics.median(cpu):.2f}" if cpu else ""
        print(f"| {name} | {statistics.median(speeds):.0f} | {min(speeds):.0f} | {max(speeds):.0f} | {shown} |")
    print("\n| ratio | median | minimum | maximum |\n|---|---|---|---|")
    for name, other in _pairs(list(rounds[0])):
        ratios = [measured[name]["speed"] / measured[other]["speed"] for measured in rounds]
        print(f"| {name} / {other} | {statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} |")


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
        before = name.replace("ours", "before").replace(", packed", "")
        if name.startswith("ours") and before in names:
            pairs.append((name, before))
    return pairs


if __name__ == "__main__":
    sys.exit(main())
