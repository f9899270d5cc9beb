"""Estimates hours and cost of the pretraining from the measurements and counts of this project.

    python recipes/librispeech/cost.py --price 3

The price of a GPU hour and the speed of the network are assumptions: give your own. No such run was made.
"""

import argparse
import sys

LAUNCHES = 4353
"""Launches of a step of `large` with one microbatch, measured on one H100 (benchmarks/results/gpu_h100_2026-11.md)."""
LAUNCH_US = 11.5
"""Time of a launch on that machine in µs: 11 to 12."""
AUDIO_S_PER_S = 6268
"""Audio that `large` took there in a second, eager, 133 x 15 s in a microbatch: an earlier version of the code."""
FLOOR_MS, FLOOR_AUDIO_S = 75.8, 1995
"""Least time of a compiled step of 133 x 15 s, counted (docs/results.md)."""
PARAMETERS = 113.1e6
"""Parameters of `large`; each has a gradient of four bytes."""
STEP_AUDIO_S, MAX_STEPS = 32_000, 80_000
"""Audio of a step with padding, and steps."""
CONFIGURATIONS = {1: 16, 8: 16, 64: 64}
"""Microbatches of a step by number of GPUs."""
GPUS_PER_NODE = 8


def main(argv: list[str] | None = None) -> str:
    """Prints and returns the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--price", type=float, default=3.0, help="of a GPU hour, in your currency (default: 3)")
    parser.add_argument("--network", type=float, default=25.0, help="GB/s of each GPU to other nodes (default: 25)")
    args = parser.parse_args(argv)
    rows = ["| GPUs | step, s | hours | GPU hours | cost | at least, GPU hours |", "|---|---|---|---|---|---|"]
    for num_gpus in CONFIGURATIONS:
        seconds = step_seconds(num_gpus, args.network)
        hours = MAX_STEPS * seconds / 3600
        floor = MAX_STEPS * STEP_AUDIO_S * FLOOR_MS / 1000 / FLOOR_AUDIO_S / 3600
        cells = (
            f"{seconds:.2g} | {hours:.1f} | {num_gpus * hours:.0f} | {args.price * num_gpus * hours:.0f} | {floor:.0f}"
        )
        rows.append(f"| {num_gpus} | {cells} |")
    table = "\n".join(rows)
    print(table)
    return table


def step_seconds(num_gpus: int, network: float) -> float:
    """Returns the time of an optimizer step in seconds.

    A microbatch takes as long as the GPU computes, or as the host needs for its launches. Between nodes, each GPU sends
    and receives the gradients once; this is added in full, although part of it runs beside the backward pass.

    Args:
        num_gpus: GPUs of the run.
        network: Speed of each GPU's connection to other nodes, in GB/s.
    """
    num_microbatches = CONFIGURATIONS[num_gpus]
    audio_s = STEP_AUDIO_S / num_microbatches
    microbatch = max(audio_s / AUDIO_S_PER_S, LAUNCHES * LAUNCH_US / 1e6)
    exchange = 2 * 4 * PARAMETERS / (network * 1e9) if num_gpus > GPUS_PER_NODE else 0.0
    return microbatch * num_microbatches / num_gpus + exchange


if __name__ == "__main__":
    main()
    sys.exit(0)
