"""Time and memory of a training step (forward, backward, AdamW) and of the quantizer, compared with NeMo's.

    python benchmarks/bench_step.py --nemo-python PATH [--our-python PATH] [--rounds 5] [--quick]

Prints Markdown. Each measurement runs in a separate process with two threads. Both sides alternate; ratios are computed
within a round, and their median is reported. Memory is the peak of the whole process; for the quantizer it is the
memory in excess of its input. NeMo needs a separate virtual environment with `nemo_toolkit[asr]==3.0.0`. For our side,
use an environment with this package only, because other packages may be imported indirectly (torchmetrics imports
transformers: 230 MB).
"""

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from peer import run_peer

CASES: dict[str, list[str]] = {
    "small, 8 x 10 s": ["small", "--batch", "8", "--seconds", "10"],
    "large, 4 x 10 s": ["large", "--batch", "4", "--seconds", "10"],
    "quantizer, 8 x 15 s": ["quantizer", "--batch", "8", "--seconds", "15"],
}


def main() -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nemo-python", required=True, help="Python of an environment with NeMo")
    parser.add_argument("--our-python", default=sys.executable, help="Python of an environment with this package")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    peers = Path(__file__).parent / "peers"
    print(
        f"# Training steps\n\nWritten by `benchmarks/bench_step.py`, torch {torch.__version__}, {platform.machine()}, ",
        end="",
    )
    print("float32, two threads. Medians over rounds; minimum and maximum in parentheses.\n")
    print("| case | ours, s | NeMo 3.0.0, s | speed-up | ours, MB | NeMo, MB | memory ratio, ours / NeMo |")
    print("|---|---|---|---|---|---|---|")
    for name, case in CASES.items():
        rounds = []
        for _ in range(1 if arguments.quick else arguments.rounds):
            nemo = _run(arguments.nemo_python, peers / "nemo_step.py", case)
            ours = _run(arguments.our_python, peers / "our_step.py", case)
            assert case[0] != "quantizer" or ours["digest"] == nemo["digest"], "the tokens differ"
            rounds.append((ours, nemo))
            print(f"{name}: {rounds[-1]}", file=sys.stderr)
        _print(name, rounds, "extra_mb" if case[0] == "quantizer" else "peak_mb")
    print("\nBoth quantizers have the same weights and computed the same tokens.")
    print("Matrix products, which are the same on both sides, take two thirds of our large step and half of NeMo's.")
    return 0


def _print(name: str, rounds: list[tuple[dict[str, Any], dict[str, Any]]], memory: str) -> None:
    def median_and_range(values: list[float], digits: int) -> str:
        return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}, {max(values):.{digits}f})"

    ours, nemo = ([side[index] for side in rounds] for index in (0, 1))
    cells = [
        f"{statistics.median(run['seconds'] for run in ours):.3g}",
        f"{statistics.median(run['seconds'] for run in nemo):.3g}",
        median_and_range([b["seconds"] / a["seconds"] for a, b in rounds], 2),
        f"{statistics.median(run[memory] for run in ours):.0f}",
        f"{statistics.median(run[memory] for run in nemo):.0f}",
        median_and_range([a[memory] / b[memory] for a, b in rounds], 3),
    ]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _run(python: str, script: Path, case: list[str]) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads(run_peer([python, script, *case]).splitlines()[-1])
    return measured


if __name__ == "__main__":
    sys.exit(main())
