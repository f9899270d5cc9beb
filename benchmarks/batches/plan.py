"""Measures the cost and the padding of plans up to full size, and compares with Lhotse's DynamicBucketingSampler.

    python -m benchmarks run plan [--cuts 36000000] [--lhotse-cuts 1000000] [--keep DIR] [--quick]

Prints Markdown. The corpora are prepared from synthetic NeMo manifests with trusted durations (log-normal: median 9 s,
standard deviation of the logarithm 0.6, 1 to 40 s), which is slow at full size; `--keep` keeps them for later runs.
Times and memory of opening a corpus are measured in separate processes, after the package is imported.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import lhotse
import numpy as np
from lhotse import CutSet
from lhotse.dataset.sampling import DynamicBucketingSampler
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import json_of, own_command
from benchmarks.harness.report import Report, machine, versions
from nestdata import BatchPlan, Corpora, Corpus, PlanConfig, PrepareConfig, prepare_corpus, summarise_plan

QUICK = ["--quick"]
NUM_LOOKUPS = 2000
NUM_PROCESSES = 3
NUM_STARTS = 3
WORLD_SIZE = 8
SECONDS = 240.0
LHOTSE_BUCKETS = 30
BUFFER = 20_000
NUM_COMPARED = 400
RATE = 16000


def main() -> int:
    """Runs the measurements and prints them."""
    parser = benchmark_parser(__doc__, quick={"cuts": 20_000, "lhotse_cuts": 10_000})
    parser.add_argument("--cuts", type=int, default=36_000_000)
    parser.add_argument("--lhotse-cuts", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_measure_indices(arguments.child)))
        return 0
    sizes = [*sorted({2_800, min(100_000, arguments.lhotse_cuts), arguments.lhotse_cuts}), arguments.cuts]
    report = Report(
        "The plan",
        __file__,
        f"{SECONDS:g} s, {WORLD_SIZE} microbatches a step, {WORLD_SIZE} ranks. Log-normal lengths: median 9 s, "
        f"standard deviation of the logarithm 0.6, 1 to 40 s. {machine()}, {versions('numpy')}, one thread, files in "
        f"the page cache. Times are medians: of opening, over {NUM_PROCESSES} processes; up to a batch, over "
        f"{NUM_STARTS} starts of rank 0.",
        results=arguments.results,
    )
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.keep or Path(temporary)
        corpora = {size: prepared_corpus(directory, size, arguments.jobs) for size in sizes}
        columns = ["cuts", "buckets", "steps an epoch", "padding", "budget used", "slowest rank over mean", "repeats"]
        columns += ["open and first indices, s", "indices, median, µs", "memory of each further process, MB"]
        report.table(columns, map(_row, corpora.values()))
        _small_corpora(report)
        _against_lhotse(report, corpora[sizes[-2]], corpora[sizes[1]])
    return 0


def _row(path: Path) -> list[str]:
    corpora = Corpora.open([path])
    plan = BatchPlan.of(corpora, _config())
    summary = summarise_plan(plan, corpora.num_samples)
    runs = [json_of(own_command(__file__, "--child", path)) for _ in range(NUM_PROCESSES)]
    figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return [
        f"{len(corpora):,}",
        f"{len(plan.buckets)}",
        f"{plan.steps_per_epoch:,}",
        f"{100 * summary.padding:.2f} %",
        f"{100 * summary.budget_used:.1f} %",
        "1",
        f"{summary.num_repeats}",
        f"{figures['open_s']:.3f}",
        f"{figures['indices_us']:.0f}",
        f"{figures['extra_mb']:.1f}",
    ]


def _against_lhotse(report: Report, path: Path, small: Path) -> None:
    """Compares plans of two widths with Lhotse's sampler, with its usual number of buckets and with as many as ours."""
    corpus = Corpus.open(path)
    columns: dict[str, list[str]] = {}
    for width in (1 / 32, 1 / 128):
        config = replace(_config(), bucket_width=width)
        plan = BatchPlan.of(corpus, config)
        summary = summarise_plan(plan, [corpus.num_samples])
        columns[f"ours, buckets of 1/{1 / width:g}"] = [
            str(len(plan.buckets)),
            f"{100 * summary.padding:.2f} %",
            f"{100 * summary.budget_used:.1f} %",
            "1",
            _shown_by_ours(small, config),
            f"{1000 * _seconds_to(path, config, 0):.1f} ms",
            f"{1000 * _seconds_to(path, config, plan.steps_per_epoch // 2):.1f} ms",
        ]
    ours = BatchPlan.of(corpus, _config())
    num_steps = min(NUM_COMPARED, ours.steps_per_epoch // 4)
    for num_buckets in (LHOTSE_BUCKETS, len(ours.buckets)):
        found = _lhotse(path, num_buckets, num_steps)
        columns[f"Lhotse, {num_buckets} buckets"] = [
            str(num_buckets),
            f"{100 * found['padding']:.2f} %",
            f"{100 * found['budget_used']:.1f} %",
            f"{found['spread']:.4f} on average, {found['spread_p99']:.3f} at the 99th percentile",
            _shown_by_lhotse(small, num_buckets),
            f"{1000 * found['first_s']:.0f} ms",
            f"{found['resume_s']:.1f} s",
        ]
    names = (
        "buckets",
        "padding",
        "budget used, padding included",
        "seconds of audio, padded, of the slowest rank over the mean",
        f"cuts in an epoch of {len(Corpus.open(small)):,}",
        "from nothing to the first batch",
        "from nothing to the middle of an epoch",
    )
    report.section(f"Against Lhotse {lhotse.__version__}, {len(corpus):,} cuts")
    report.text(f"""Lhotse's `DynamicBucketingSampler` is shuffled, with {BUFFER:,} cuts of buffer, its defaults of
        `drop_last` and `sync_buckets`, and bins estimated from 10,000 cuts. Both sides read the same `cuts.jsonl`, in
        one process of one thread. Padding and balance of Lhotse are those of the first {num_steps} steps of
        {WORLD_SIZE} ranks.""")
    report.table(["what", *columns], zip(names, *columns.values(), strict=True))


def _small_corpora(report: Report) -> None:
    """Compares padding of small corpora with the least of any steps that have one shape each."""
    report.section("Small corpora")
    report.text(f"""Full microbatches would be mostly padding here, so steps hold fewer cuts. The least is that of any
        steps whose {WORLD_SIZE} microbatches have one shape, found by dynamic programming. "One long recording" is 120
        cuts of 5.5 to 12 s, half of them equally long, and one of 74 s.""")
    lengths = {"120 cuts and one long recording": _one_long_recording(), "the 120 cuts": _one_long_recording()[:-1]}
    lengths |= {f"{size:,} cuts, log-normal": _log_normal(size) for size in (100, 300, 1000, 2000, 4000, 10_000)}
    rows = []
    for name, cuts in lengths.items():
        for seconds in (SECONDS, 2000.0):
            config = PlanConfig(max_batch_seconds=seconds, microbatches_per_step=WORLD_SIZE)
            summary = summarise_plan(BatchPlan(cuts, RATE, config), cuts)
            least = 1 - int(cuts.sum()) / _least_samples(cuts[::-1].tolist(), round(seconds * RATE))
            shares = (f"{100 * share:.2f} %" for share in (summary.padding, least, summary.budget_used))
            rows.append([name, f"{seconds:g} s", f"{summary.steps_per_epoch}", *shares])
    report.table(["corpus", "microbatch", "steps an epoch", "padding", "least padding", "budget used"], rows)


def _one_long_recording() -> NDArray[np.int64]:
    seconds = [5.5] * 56 + np.geomspace(5.6, 12, 64).tolist() + [74.0]
    return (np.array(seconds) * RATE).astype(np.int64)


def _log_normal(num_cuts: int) -> NDArray[np.int64]:
    seconds = np.random.default_rng(0).lognormal(np.log(9), 0.6, num_cuts).clip(1, 40)
    return np.sort(seconds * RATE).astype(np.int64)


def _least_samples(longest_first: list[int], budget: int) -> int:
    """Returns the least samples, padding included, by trying every number of cuts for every step."""
    num_rows = -(-len(longest_first) // WORLD_SIZE)
    least = [0] * (num_rows + 1)
    for row in reversed(range(num_rows)):
        longest = longest_first[row * WORLD_SIZE]
        sizes = range(1, min(budget // longest, num_rows - row) + 1)
        least[row] = min(size * WORLD_SIZE * longest + least[row + size] for size in sizes)
    return least[0]


def _seconds_to(path: Path, config: PlanConfig, step: int) -> float:
    """Returns the median time from nothing to the cuts of a step of rank 0."""
    seconds = []
    for _ in range(NUM_STARTS):
        started = time.perf_counter()
        BatchPlan.of(Corpus.open(path), config).indices(step, 0)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _shown_by_ours(path: Path, config: PlanConfig) -> str:
    plan = BatchPlan.of(Corpus.open(path), config)
    return _times_shown(
        path,
        [
            int(i)
            for step in range(plan.steps_per_epoch)
            for rank in range(WORLD_SIZE)
            for i in plan.indices(step, rank)
        ],
    )


def _shown_by_lhotse(path: Path, num_buckets: int) -> str:
    batches = (batch for rank in range(WORLD_SIZE) for batch in _sampler(path, rank, num_buckets))
    # Lhotse gives a repeated cut an id of its own, but its recording's id stays.
    return _times_shown(path, [cut.recording_id for batch in batches for cut in batch])


def _times_shown(path: Path, shown: Sequence[Hashable]) -> str:
    """Returns how many cuts were not shown in an epoch, and how many more than once, as a cell."""
    times = Counter(shown)
    return f"{len(Corpus.open(path)) - len(times)} not shown, {sum(each > 1 for each in times.values())} repeated"


def _lhotse(path: Path, num_buckets: int, num_steps: int) -> dict[str, float]:
    """Compares the ranks in the first steps, then restores rank 0 in the middle of an epoch, as a resume does."""
    iterators = [iter(_sampler(path, rank, num_buckets)) for rank in range(WORLD_SIZE)]
    durations = [[cut.duration for cut in next(iterator)] for _ in range(num_steps) for iterator in iterators]
    real = sum(map(sum, durations))
    padded = np.array([max(each) * len(each) for each in durations])
    costs = padded.reshape(num_steps, WORLD_SIZE)
    spread = costs.max(axis=1) / costs.mean(axis=1)
    del iterators  # each of them holds a buffer
    first = _sampler(path, 0, num_buckets)
    batches = iter(first)
    total_s, own_s = float(Corpus.open(path).hours) * 3600, 0.0
    while own_s < total_s / WORLD_SIZE / 2:
        own_s += sum(cut.duration for cut in next(batches))
    state = first.state_dict()
    del first, batches
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for resumed in (False, True) * NUM_STARTS:
        started = time.perf_counter()
        fresh = _sampler(path, 0, num_buckets)
        if resumed:
            fresh.load_state_dict(deepcopy(state))
        next(iter(fresh))
        seconds[resumed].append(time.perf_counter() - started)
    return {
        "padding": 1 - real / padded.sum(),
        "budget_used": float(padded.mean() / SECONDS),
        "spread": float(spread.mean()),
        "spread_p99": float(np.quantile(spread, 0.99)),
        "first_s": statistics.median(seconds[False]),
        "resume_s": statistics.median(seconds[True]),
    }


def _sampler(path: Path, rank: int, num_buckets: int) -> DynamicBucketingSampler:
    return DynamicBucketingSampler(
        CutSet.from_jsonl_lazy(path / "cuts.jsonl"),
        max_duration=SECONDS,
        shuffle=True,
        num_buckets=num_buckets,
        buffer_size=BUFFER,
        seed=0,
        world_size=WORLD_SIZE,
        rank=rank,
    )


def _config() -> PlanConfig:
    return PlanConfig(max_batch_seconds=SECONDS, microbatches_per_step=WORLD_SIZE)


def _measure_indices(path: Path) -> dict[str, float]:
    before_mb = _resident_mb()
    started = time.perf_counter()
    plan = BatchPlan.of(Corpus.open(path), _config())
    plan.indices(123_456_789, 3)
    open_s = time.perf_counter() - started
    seconds = []
    for i in range(NUM_LOOKUPS):
        started = time.perf_counter()
        plan.indices(i * 7919 % (3 * plan.steps_per_epoch), i % WORLD_SIZE)
        seconds.append(time.perf_counter() - started)
    return {"open_s": open_s, "indices_us": 1e6 * statistics.median(seconds), "extra_mb": _resident_mb() - before_mb}


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def prepared_corpus(directory: Path, num_cuts: int, jobs: int) -> Path:
    """Returns the path of a synthetic corpus, prepared unless it exists. Its audio files do not exist."""
    path = directory / f"synthetic-{num_cuts}.corpus"
    if path.exists():
        return path
    manifest = directory / f"synthetic-{num_cuts}.json"
    random = np.random.default_rng(0)
    with manifest.open("w") as file:
        for start in range(0, num_cuts, 1_000_000):
            durations = random.lognormal(np.log(9), 0.6, min(1_000_000, num_cuts - start)).clip(1, 40)
            file.writelines(
                f'{{"audio_filepath": "{i // 1000}/{i}.flac", "duration": {duration:.4f}}}\n'
                for i, duration in enumerate(durations.tolist(), start=start)
            )
    prepare_corpus([manifest], path, PrepareConfig(probe="missing"), jobs=jobs)
    manifest.unlink()
    return path


if __name__ == "__main__":
    sys.exit(main())
