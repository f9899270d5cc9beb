"""What a plan costs and how full its batches are, for synthetic log-normal lengths.

    python benchmarks/bench_plan.py [--cuts 36000000] [--quick]

Prints Markdown. Lengths: median 9 s, log-deviation 0.6, 1 to 40 s, at 16 kHz.
"""

import argparse
import platform
import statistics
import sys
import time

import numpy as np

from nestdata import BatchPlan, PlanConfig

NUM_LOOKUPS = 2000


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=36_000_000)
    parser.add_argument("--quick", action="store_true", help="only small corpora")
    arguments = parser.parse_args()
    sizes = [2_800, 100_000, 1_000_000, *([] if arguments.quick else [arguments.cuts])]
    print(f"# The plan\n\nMade by `benchmarks/bench_plan.py`, numpy {np.__version__}, {platform.machine()}.")
    print("240 s, 8 microbatches a step.\n")
    print("| cuts | buckets | steps an epoch | padding | budget used | repeats | lay out, ms | rows, median, µs |")
    print("|---|---|---|---|---|---|---|---|")
    for size in sizes:
        print(measure(size))
    return 0


def measure(num_cuts: int) -> str:
    """Returns a row of the table."""
    lengths = np.random.default_rng(0).lognormal(np.log(9), 0.6, num_cuts).clip(1, 40) * 16000
    num_samples = np.sort(lengths).astype(np.int64)
    config = PlanConfig(max_batch_seconds=240, microbatches_per_step=8)
    started = time.perf_counter()
    plan = BatchPlan(num_samples, 16000, config, content="synthetic")
    lay_out_ms = 1000 * (time.perf_counter() - started)
    slots = sum(8 * b.num_groups * b.cuts_per_microbatch for b in plan.buckets)
    padded = sum(8 * b.num_groups * b.cuts_per_microbatch * b.padded_samples for b in plan.buckets)
    seconds = []
    for i in range(NUM_LOOKUPS):
        started = time.perf_counter()
        plan.rows(i * 7919 % (3 * plan.steps_per_epoch), i % 8)
        seconds.append(time.perf_counter() - started)
    padding = 1 - num_samples.sum() / padded
    used = padded / (plan.steps_per_epoch * 8 * 240 * 16000)
    return (
        f"| {num_cuts:,} | {len(plan.buckets)} | {plan.steps_per_epoch:,} | {100 * padding:.2f} % "
        f"| {100 * used:.1f} % | "
        f"{slots - num_cuts} | {lay_out_ms:.1f} | {1e6 * statistics.median(seconds):.0f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
