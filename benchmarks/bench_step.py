"""Time and memory of a training step (forward, backward, AdamW) and of the quantizer, compared with NeMo's.

    python benchmarks/bench_step.py --nemo-python PATH [--our-python PATH] [--keep ROUNDS.json] [--rounds 5] [--quick]

Prints Markdown. Each measurement runs in a separate process with two threads. Both sides have the same configuration,
batch and fused AdamW, in float32. They alternate; ratios are computed within a round, and their median is reported.
Memory is the peak of the whole process; for the quantizer it is the memory in excess of its input. NeMo needs a
separate virtual environment with `nemo_toolkit[asr]==3.0.0`. An environment with this package only takes less memory,
because other packages may be imported indirectly (torchmetrics imports transformers: 230 MB).
"""

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from measured import measured_line
from peer import run_peer
from peers.measuring import STEPS

CASES: dict[str, list[str]] = {
    "small, 8 x 10 s": ["small", "--batch", "8", "--seconds", "10"],
    "large, 4 x 10 s": ["large", "--batch", "4", "--seconds", "10"],
    "quantizer, 8 x 15 s": ["quantizer", "--batch", "8", "--seconds", "15"],
}
MEASURED = (
    "benchmarks/bench_step.py",
    "benchmarks/peers/measuring.py",
    "benchmarks/peers/nemo_model.py",
    "benchmarks/peers/nemo_step.py",
    "benchmarks/peers/our_step.py",
    "nestmodel/nn",
    "nestmodel/training/schedule.py",
)


def main() -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nemo-python", required=True, help="Python of an environment with NeMo")
    parser.add_argument("--our-python", default=sys.executable, help="Python of an environment with this package")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="file with the rounds so far; the same command measures the others")
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    rounds = json.loads(arguments.keep.read_text()) if arguments.keep and arguments.keep.exists() else []
    while len(rounds) < (1 if arguments.quick else arguments.rounds):
        rounds.append({name: _measure(arguments, case) for name, case in CASES.items()})
        print(rounds[-1], file=sys.stderr)
        if arguments.keep:
            arguments.keep.write_text(json.dumps(rounds))
    print(f"""# Training steps

Made by `benchmarks/bench_step.py` on {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}.
{measured_line(*MEASURED)}

{len(rounds)} rounds, in each of which the sides alternate: medians, with minimum and maximum in parentheses.
Each process makes {STEPS} steps, the first two of which are not counted, and reports the median.
Both sides have two threads, float32, torch's fused AdamW and the same configuration.

| case | ours, s | NeMo 3.0.0, s | speed-up | ours, MB | NeMo, MB | memory ratio, ours / NeMo |
|---|---|---|---|---|---|---|""")
    for name, (what, *_) in CASES.items():
        _print(name, [each[name] for each in rounds], "extra_mb" if what == "quantizer" else "peak_mb")
    print("\nBoth quantizers have the same weights and computed the same tokens.")
    return 0


def _measure(arguments: argparse.Namespace, case: list[str]) -> dict[str, dict[str, Any]]:
    peers = Path(__file__).parent / "peers"
    nemo = _run(arguments.nemo_python, peers / "nemo_step.py", case)
    ours = _run(arguments.our_python, peers / "our_step.py", case)
    assert case[0] != "quantizer" or ours["digest"] == nemo["digest"], "the tokens differ"
    return {"ours": ours, "nemo": nemo}


def _print(name: str, rounds: list[dict[str, dict[str, Any]]], memory: str) -> None:
    def median_and_range(values: list[float], digits: int) -> str:
        return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"

    ours, nemo = ([each[side] for each in rounds] for side in ("ours", "nemo"))
    digits = 4 if memory == "extra_mb" else 2
    cells = [
        median_and_range([run["seconds"] for run in ours], digits),
        median_and_range([run["seconds"] for run in nemo], digits),
        median_and_range([b["seconds"] / a["seconds"] for a, b in zip(ours, nemo, strict=True)], 2),
        f"{statistics.median(run[memory] for run in ours):.0f}",
        f"{statistics.median(run[memory] for run in nemo):.0f}",
        median_and_range([a[memory] / b[memory] for a, b in zip(ours, nemo, strict=True)], 3),
    ]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _run(python: str, script: Path, case: list[str]) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads(run_peer([python, script, *case]).splitlines()[-1])
    return measured


if __name__ == "__main__":
    sys.exit(main())
