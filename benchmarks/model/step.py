"""Time and memory of a training step (forward, backward, AdamW) and of the quantizer, compared with NeMo's.

    python -m benchmarks run step --nemo-python PATH [--our-python PATH] [--keep ROUNDS.json] [--rounds 5] [--quick]

Prints Markdown. Each measurement runs in a separate process with two threads. Both sides have the same configuration,
batch and fused AdamW, in float32. They alternate; ratios are computed within a round, and their median is reported.
Memory is the peak of the whole process; for the quantizer it is the memory in excess of its input. NeMo needs a
separate virtual environment with `nemo_toolkit[asr]==3.0.0`. An environment with this package only takes less memory,
because other packages may be imported indirectly (torchmetrics imports transformers: 230 MB).
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, json_of
from benchmarks.harness.report import Report, machine, versions
from benchmarks.harness.rounds import spread
from benchmarks.peers.measuring import STEPS

QUICK = None
CASES: dict[str, list[str]] = {
    "small, 8 x 10 s": ["small", "--batch", "8", "--seconds", "10"],
    "large, 4 x 10 s": ["large", "--batch", "4", "--seconds", "10"],
    "quantizer, 8 x 15 s": ["quantizer", "--batch", "8", "--seconds", "15"],
}


def main() -> int:
    """Measures and prints the table."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"rounds": 1})
    parser.add_argument("--nemo-python", required=True, help="Python of an environment with NeMo")
    parser.add_argument("--our-python", default=sys.executable, help="Python of an environment with this package")
    parser.add_argument("--keep", type=Path, help="file with the rounds so far; the same command measures the others")
    arguments = parser.parse_args()
    rounds = json.loads(arguments.keep.read_text()) if arguments.keep and arguments.keep.exists() else []
    while len(rounds) < arguments.rounds:
        rounds.append({name: _measure(arguments, case) for name, case in CASES.items()})
        print(rounds[-1], file=sys.stderr)
        if arguments.keep:
            arguments.keep.write_text(json.dumps(rounds))
    report = Report(
        "Training steps",
        __file__,
        f"{len(rounds)} rounds, in each of which the sides alternate, {machine()}, {versions('torch')}. Medians, with "
        "minimum and maximum in parentheses.",
        results=arguments.results,
    )
    report.text(f"""Each process makes {STEPS} steps, the first two of which are not counted, and reports the median.
        Both sides have two threads, float32, torch's fused AdamW and the same configuration.""")
    columns = ("case", "ours, s", "NeMo 3.0.0, s", "speed-up", "ours, MB", "NeMo, MB", "memory ratio, ours / NeMo")
    report.table(columns, (_row(name, [each[name] for each in rounds]) for name in CASES))
    report.text("Both quantizers have the same weights and computed the same tokens.")
    return 0


def _measure(arguments: argparse.Namespace, case: list[str]) -> dict[str, dict[str, Any]]:
    nemo = json_of([arguments.nemo_python, PEERS / "nemo_step.py", *case])
    ours = json_of([arguments.our_python, PEERS / "our_step.py", *case])
    assert case[0] != "quantizer" or ours["digest"] == nemo["digest"], "the tokens differ"
    return {"ours": ours, "nemo": nemo}


def _row(name: str, rounds: list[dict[str, dict[str, Any]]]) -> list[str]:
    ours, nemo = ([each[side] for each in rounds] for side in ("ours", "nemo"))
    memory, digits = ("extra_mb", 4) if CASES[name][0] == "quantizer" else ("peak_mb", 2)
    return [
        name,
        spread([run["seconds"] for run in ours], digits),
        spread([run["seconds"] for run in nemo], digits),
        spread([b["seconds"] / a["seconds"] for a, b in zip(ours, nemo, strict=True)]),
        f"{statistics.median(run[memory] for run in ours):.0f}",
        f"{statistics.median(run[memory] for run in nemo):.0f}",
        spread([a[memory] / b[memory] for a, b in zip(ours, nemo, strict=True)], 3),
    ]


if __name__ == "__main__":
    sys.exit(main())
