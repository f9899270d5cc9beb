"""Time from the start of an epoch to its first batch, with loader workers from a fork server and from the rank.

    python -m benchmarks run worker_start CORPUS [--quick]

Prints Markdown: the CPU time of a worker until its first request, and the time until the first batch of an epoch.
"""

# Workers from the fork server import this module, so it imports little.
import platform
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import benchmark_parser

QUICK = ["{corpus}", "--quick"]
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


def worker_cpu_s(method: str) -> float:
    """Returns the CPU time of a new worker at its first request, in seconds."""
    from torch.utils.data import DataLoader

    loader: DataLoader[float] = DataLoader(
        ReportsStart(),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=1,
        multiprocessing_context=method,
        collate_fn=unchanged,
    )
    seconds: float = next(iter(loader))
    return seconds


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


def main() -> int:
    """Runs the benchmark."""
    from nestdata import AudioNoiseDataset, BatchPlan, Corpora, PlanConfig, start_fork_server

    parser = benchmark_parser(__doc__, rounds=7, quick={"rounds": 2})
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    start_fork_server()
    import torch

    from benchmarks.harness.report import Report, machine, versions
    from benchmarks.harness.rounds import run_rounds, spread

    torch.set_num_threads(1)
    corpus = Corpora.open([arguments.corpus])
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=60.0, microbatches_per_step=8))
    dataset = AudioNoiseDataset(corpus, plan)
    dataset.load((0, 0))  # the files are in the page cache
    first_batch_s(dataset, 1, "forkserver")  # waits until the fork server has imported everything
    report = Report(
        "Starting loader workers",
        __file__,
        f"Python {platform.python_version()}, {versions('torch')}, one thread, {machine()}, {arguments.rounds} rounds, "
        f"{len(corpus)} cuts, files in the page cache. Medians, with the least and the most, in ms.",
        measured=["nestdata/fork_server.py", "nestdata/freeze.py", "nestdata/batch/loader.py"],
        results=arguments.results,
    )
    rows = {
        "CPU time of a worker until its first request": {method: partial(worker_cpu_s, method) for method in METHODS}
    }
    for number in arguments.workers:
        first = {method: partial(first_batch_s, dataset, number, method) for method in METHODS}
        rows[f"first batch of an epoch, {number} workers"] = first

    def row(what: str) -> list[str]:
        rounds = run_rounds(rows[what], arguments.rounds, warm_up=0)
        return [what, *(spread([1000 * found[method] for found in rounds], 0) for method in METHODS)]

    report.table(["what", *METHODS], map(row, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
