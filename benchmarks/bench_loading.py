"""Measures the loading speed of noisy batches, and compares with NeMo's dataset and with loops that only decode.

    python benchmarks/bench_loading.py SPEECH.json NOISE.json [--nemo-python PATH] [--rounds 5] [--quick]

Prints Markdown. Every round measures each contestant once. Ratios are computed within a round and their median is
printed, because the speed of a shared machine varies. NeMo needs a separate virtual environment with
`nemo_toolkit[asr]==3.0.0`. All contestants load the same utterances of 1 to 60 s, with one thread per process. Noise is
added as in NEST: half of the cuts receive interference, half of those noise, over half of their length.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

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
NEMO_SECONDS = 10.0


def main() -> int:
    """Runs the measurements and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path)
    parser.add_argument("noise", type=Path)
    parser.add_argument("--nemo-python", help="Python of an environment with NeMo; without it, NeMo is not measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        contestants = _contestants(arguments, Path(directory))
        rounds = []
        num_rounds = 1 if arguments.quick else arguments.rounds
        for number in range(-1, num_rounds):  # the first round fills caches and is discarded
            measured = {name: measure() for name, measure in contestants.items()}
            print(f"round {number}: {measured}", file=sys.stderr)
            rounds.append(measured)
    _print(rounds[1:])
    return 0


def _contestants(arguments: argparse.Namespace, directory: Path) -> dict[str, Callable[[], float]]:
    limits = PrepareConfig(min_seconds=LIMITS[0], max_seconds=LIMITS[1])
    prepare_corpus([arguments.speech], directory / "speech.corpus", limits)
    prepare_corpus([arguments.noise], directory / "noise.corpus")
    prepare_corpus([arguments.noise], directory / "bank.corpus", PrepareConfig(pcm=True))
    speech = Corpus.open(directory / "speech.corpus")
    noise = Corpus.open(directory / "noise.corpus")
    paths = [_path(speech, index) for index in range(len(speech))]
    noises = [(_path(noise, index), noise.num_samples_of(index)) for index in range(len(noise))]
    np.random.default_rng(0).shuffle(paths)
    contestants: dict[str, Callable[[], float]] = {
        "loop, speech": lambda: _loop(paths),
        "loop, speech and a noise crop": lambda: _loop_with_noise(paths, noises),
    }
    for name, config in {
        "240 s": PlanConfig(max_batch_seconds=240.0, microbatches_per_step=1),
        "16 cuts": PlanConfig(max_batch_seconds=960.0, max_cuts=16, microbatches_per_step=1),
    }.items():
        for kind in ("bank", "noise"):
            sampler = NoiseSampler(Corpus.open(directory / f"{kind}.corpus"))
            dataset = AudioNoiseDataset(speech, BatchPlan.of(speech, config), sampler, SpeakerNoiseMixer())
            label = f"ours, {name}, {'noise bank' if kind == 'bank' else 'noise files'}"
            contestants[label] = lambda dataset=dataset: _ours(dataset, 0)
            contestants[f"{label}, 2 workers"] = lambda dataset=dataset: _ours(dataset, 2)
    if arguments.nemo_python:
        for workers in (0, 2):
            label = "NeMo, 16 cuts" + (", 2 workers" if workers else "")
            contestants[label] = lambda workers=workers: _nemo(arguments, workers)
    return contestants


def _ours(dataset: AudioNoiseDataset, workers: int) -> float:
    """Loads one epoch, or three with workers, so that the start of the workers counts as little as in NeMo's loader."""
    num_utterances, epochs = 0, 3 if workers else 1
    batch_indices = microbatches(dataset.plan, num_steps=epochs * dataset.plan.steps_per_epoch)
    started = time.perf_counter()
    for batch in dataset.loader(batch_indices, num_workers=workers):
        num_utterances += len(batch.sample_id)
    return num_utterances / (time.perf_counter() - started)


def _loop(paths: list[str]) -> float:
    started = time.perf_counter()
    for path in paths:
        soundfile.read(path, dtype="float32")
    return len(paths) / (time.perf_counter() - started)


def _loop_with_noise(paths: list[str], noises: list[tuple[str, int]]) -> float:
    random = np.random.default_rng(0)
    started = time.perf_counter()
    for path in paths:
        samples, _ = soundfile.read(path, dtype="float32")
        noise, num_samples = noises[int(random.integers(len(noises)))]
        start = int(random.integers(max(1, num_samples - len(samples))))
        soundfile.read(noise, frames=min(len(samples), num_samples), start=start, dtype="float32")
    return len(paths) / (time.perf_counter() - started)


def _nemo(arguments: argparse.Namespace, workers: int) -> float:
    script = Path(__file__).parent / "peers" / "nemo_loading.py"
    command = [arguments.nemo_python, str(script), str(arguments.speech), str(arguments.noise)]
    command += ["--workers", str(workers), "--seconds", str(NEMO_SECONDS)]
    return float(json.loads(run_peer(command).splitlines()[-1])["utterances_per_s"])


def _path(corpus: Corpus, index: int) -> str:
    return str(corpus.line(index)["recording"]["sources"][0]["source"])


def _print(rounds: list[dict[str, float]]) -> None:
    print(f"# Loading\n\nMade by `benchmarks/bench_loading.py`, {len(rounds)} rounds, numpy {np.__version__}, ", end="")
    print(f"soundfile {soundfile.__version__}, {platform.machine()}. Utterances per second; ratios within a round.\n")
    print("| contestant | utterances/s, median | minimum | maximum |")
    print("|---|---|---|---|")
    for name in rounds[0]:
        values = [measured[name] for measured in rounds]
        print(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} | {max(values):.0f} |")
    print("\n| ratio | median | minimum | maximum |")
    print("|---|---|---|---|")
    for name in rounds[0]:
        if not name.startswith("ours"):
            continue
        workers = ", 2 workers" if name.endswith("2 workers") else ""
        loop = "loop, speech" if "bank" in name else "loop, speech and a noise crop"
        for other in ([] if workers else [loop]) + [f"NeMo, 16 cuts{workers}"]:
            if other in rounds[0]:
                ratios = [measured[name] / measured[other] for measured in rounds]
                cells = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f}"
                print(f"| {name} / {other} | {cells} |")


if __name__ == "__main__":
    sys.exit(main())
