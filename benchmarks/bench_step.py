"""What a training step costs beside NeMo's: forward, backward and AdamW; and the quantizer alone.

    python benchmarks/bench_step.py --nemo-python PATH [--our-python PATH] [--rounds 5] [--quick]

Prints Markdown. Each measurement is a process of its own on two threads; both sides take turns, ratios are taken within
a round, and their median is given. Memory is the peak of the whole process, and for the quantizer what it needs above
its input. NeMo needs a virtual environment of its own with `nemo_toolkit[asr]==3.0.0`; ours is best one of
the package alone, since what else lies in an environment may be imported along (transformers by torchmetrics: 230 MB).
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
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nemo-python", required=True, help="Python of an environment with NeMo")
    parser.add_argument("--our-python", default=sys.executable, help="Python of an environment with this package")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    peers = Path(__file__).parent / "peers"
    print(
        f"# Training steps\n\nMade by `benchmarks/bench_step.py`, torch {torch.__version__}, {platform.machine()}, ",
        end="",
    )
    print("float32, two threads. Medians over rounds, in brackets the least and the most.\n")
    print("| what | ours, s | NeMo 3.0.0, s | times faster | ours, MB | NeMo, MB | memory, ours over NeMo's |")
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
    print("\nThe quantizers have the same weights, and gave the same tokens.")
    print("Of a large step, two thirds of ours and half of NeMo's are matrix products, the same on both sides.")
    return 0


def _print(name: str, rounds: list[tuple[dict[str, Any], dict[str, Any]]], memory: str) -> None:
    def middle(values: list[float], digits: int) -> str:
        return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}, {max(values):.{digits}f})"

    ours, nemo = ([side[index] for side in rounds] for index in (0, 1))
    cells = [
        f"{statistics.median(run['seconds'] for run in ours):.3g}",
        f"{statistics.median(run['seconds'] for run in nemo):.3g}",
        middle([b["seconds"] / a["seconds"] for a, b in rounds], 2),
        f"{statistics.median(run[memory] for run in ours):.0f}",
        f"{statistics.median(run[memory] for run in nemo):.0f}",
        middle([a[memory] / b[memory] for a, b in rounds], 3),
    ]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _run(python: str, script: Path, case: list[str]) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads(run_peer([python, script, *case]).splitlines()[-1])
    return measured


if __name__ == "__main__":
    sys.exit(main())
