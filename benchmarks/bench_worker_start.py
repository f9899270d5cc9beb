"""Time from the start of an epoch to its first batch, with loader workers from a fork server and from the rank.

python benchmarks/bench_worker_start.py CORPUS [--quick]

Prints Markdown: the CPU time of a worker until its first request, and the time until the first batch of an epoch.
"""

# Workers from the fork server import this module, so it imports little.
import argparse
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

METHODS = ("fork", "forkserver")


class ReportsStart:
    """A dataset whose batches say how much CPU time their worker has used so far."""

    def __getitem__(self, index: int) -> float:
        return time.process_time()

    def __len__(self) -> int:
        return 8


def unchanged(batch: Any) -> Any:
    """Takes the place of torch's conversion to tensors."""
    return batch


def worker_cpu_s(method: str, rounds: int) -> list[float]:
    """Returns the CPU time of new workers at their first request, in seconds."""
    from torch.utils.data import DataLoader

    found = []
    for _ in range(rounds):
        loader = DataLoader(
            ReportsStart(),  # type: ignore[arg-type]
            batch_size=None,
            num_workers=1,
            multiprocessing_context=method,
            collate_fn=unchanged,
        )
        found.append(next(iter(loader)))
    return found


def first_batch_s(dataset: Any, num_workers: int, method: Any) -> float:
    """Returns the seconds until the first batch of an epoch of eight batches."""
    from nestdata import microbatches

    loader = dataset.loader(
        microbatches(dataset.plan, num_steps=1), num_workers=num_workers, start_method=method, num_slots=8
    )
    began = time.perf_counter()
    batches = iter(loader)
    next(batches)
    taken = time.perf_counter() - began
    for _ in batches:
        pass
    return taken


def main(argv: list[str]) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--quick", action="store_true", help="two rounds instead of seven")
    arguments = parser.parse_args(argv)

    from nestdata import AudioNoiseDataset, BatchPlan, Corpora, PlanConfig, start_fork_server

    start_fork_server()
    import torch
    from measured import measured_line

    torch.set_num_threads(1)
    corpus = Corpora.open([arguments.corpus])
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=60.0, microbatches_per_step=8))
    dataset = AudioNoiseDataset(corpus, plan)
    dataset.load((0, 0))  # the files are in the page cache
    rounds = 2 if arguments.quick else 7
    first_batch_s(dataset, 1, "forkserver")  # waits until the fork server has imported everything
    print("# Starting loader workers\n")
    print(f"Made by `benchmarks/bench_worker_start.py`, Python {platform.python_version()}, torch {torch.__version__},")
    print(f"one thread, {os.cpu_count()} cores, {rounds} rounds, {len(corpus)} cuts,")
    print("files in the page cache. Medians, with the least and the most, in ms.\n")
    paths = (
        "benchmarks/bench_worker_start.py",
        "nestdata/fork_server.py",
        "nestdata/freeze.py",
        "nestdata/batch/loader.py",
    )
    print(measured_line(*paths) + "\n")
    print(f"| what | {' | '.join(METHODS)} |\n|---|{'---|' * len(METHODS)}")
    cells = [_spread(worker_cpu_s(method, rounds)) for method in METHODS]
    print(f"| CPU time of a worker until its first request | {' | '.join(cells)} |")
    for num_workers in arguments.workers:
        taken: dict[str, list[float]] = {method: [] for method in METHODS}
        for _ in range(rounds):
            for method in METHODS:
                taken[method].append(first_batch_s(dataset, num_workers, method))
        cells = [_spread(taken[method]) for method in METHODS]
        print(f"| first batch of an epoch, {num_workers} workers | {' | '.join(cells)} |")
    return 0


def _spread(seconds: list[float]) -> str:
    import statistics

    median, least, most = (1000 * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{median:.0f} ({least:.0f} to {most:.0f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
