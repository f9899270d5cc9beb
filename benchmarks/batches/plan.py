"""Measures the cost and the padding of plans up to full size, and compares with Lhotse's DynamicBucketingSampler.

    python -m benchmarks run plan [--cuts 36000000] [--lhotse-cuts 1000000] [--keep DIR] [--quick]

Prints Markdown. The corpora are prepared from synthetic NeMo manifests with trusted durations (log-normal: median 9 s,
standard deviation of the logarithm 0.6, 1 to 40 s), which is slow at full size; `--keep` keeps them for later runs.
Times and memory of opening a corpus are measured in separate processes, after the package is imported.
"""

import argparse
import json
import math
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
HOURS = 2, 15, 60, 250, 1000, 10_000
MEAN_S = 10.65
QUADRATIC_S = 84
PRESETS = {"small": (4000.0, 8), "large": (2000.0, 16), "xlarge": (800.0, 32)}
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
        _full_steps(report)
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
        f"{_slowest_over_mean(plan, WORLD_SIZE):.4f}",
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
            f"{_slowest_over_mean(plan, WORLD_SIZE):.4f} on average",
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
        one process of one thread. Padding and balance of Lhotse are measured in the first {num_steps} steps of
        {WORLD_SIZE} ranks.""")
    report.table(["what", *columns], zip(names, *columns.values(), strict=True))


def _full_steps(report: Report) -> None:
    """Compares steps of corpora of all sizes with what was asked for, and with sorted microbatches."""
    report.section("Full steps")
    report.text(f"""Log-normal lengths as above. "Asked" is the mean audio of a step, without padding, over what
        `max_batch_seconds` and `microbatches_per_step` allow. "Sorted" is the padding if sorted cuts fill one
        microbatch after the other, longest first. Mixed steps have microbatches of neighbouring lengths. "Pairs kept"
        is the share of the pairs of cuts of a microbatch that are in one microbatch in the next epoch as well. The last
        columns are the work of the slowest of 2 and of 4 ranks over their mean, on average over steps, where a cut of d
        seconds is d + d² / {QUADRATIC_S} of work: attention counts as in `small`, the preset where it counts most.""")
    rows = []
    for hours in HOURS:
        lengths = _log_normal(round(hours * 3600 / MEAN_S))
        for preset, (seconds, microbatches) in PRESETS.items():
            plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=seconds, microbatches_per_step=microbatches))
            summary = summarise_plan(plan, lengths)
            rows.append(
                [
                    f"{hours:,}",
                    f"{preset}, {microbatches} x {seconds:g} s",
                    f"{summary.steps_per_epoch:,}",
                    f"{100 * summary.seconds_per_step / summary.seconds_asked:.0f} %",
                    f"{100 * summary.padding:.2f} %",
                    f"{100 * _sorted_padding(lengths, round(seconds * RATE)):.2f} %",
                    f"{summary.num_mixed_steps:,}",
                    f"{100 * summary.pairs_kept:.0f} %",
                    *(f"{_slowest_over_mean(plan, ranks, QUADRATIC_S):.3f}" for ranks in (2, 4)),
                ]
            )
    columns = ["hours", "preset", "steps an epoch", "asked", "padding", "sorted", "mixed steps", "pairs kept"]
    report.table([*columns, "2 ranks", "4 ranks"], rows)


def _slowest_over_mean(plan: BatchPlan, num_ranks: int, quadratic_s: float = math.inf) -> float:
    """Returns the work of the slowest rank over the mean, on average over the first steps.

    Args:
        plan: The plan.
        num_ranks: Number of ranks.
        quadratic_s: q, if a cut of d seconds is d + d² / q of work.
    """
    per_step, ratios = plan.config.microbatches_per_step, []
    for step in range(min(plan.steps_per_epoch, NUM_COMPARED)):
        buckets = [plan.microbatch(step, number).bucket for number in range(per_step)]
        seconds = np.array([bucket.padded_samples / RATE for bucket in buckets])
        work = np.array([bucket.cuts_per_microbatch for bucket in buckets]) * (seconds + seconds**2 / quadratic_s)
        of_ranks = work.reshape(num_ranks, -1).sum(1)
        ratios.append(of_ranks.max() / of_ranks.mean())
    return float(np.mean(ratios))


def _log_normal(num_cuts: int) -> NDArray[np.int64]:
    seconds = np.random.default_rng(0).lognormal(np.log(9), 0.6, num_cuts).clip(1, 40)
    return np.sort(seconds * RATE).astype(np.int64)


def _sorted_padding(lengths: NDArray[np.int64], budget: int) -> float:
    end, padded = len(lengths), 0
    while end:
        size = max(1, min(end, budget // int(lengths[end - 1])))
        padded += size * int(lengths[end - 1])
        end -= size
    return 1 - int(lengths.sum()) / padded


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
