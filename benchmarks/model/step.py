"""Time and memory of a training step (forward, backward, AdamW), compared with NeMo's.

    python -m benchmarks run step --nemo-python PATH [--our-python PATH] [--rounds 5] [--quick]

Prints Markdown. Each measurement runs in a separate process with two threads. Both sides have the same configuration,
batch and fused AdamW, in float32. They alternate; ratios are computed within a round, and their median is reported.
Memory is the peak of the whole process. NeMo needs a separate virtual environment with `nemo_toolkit[asr]==3.0.0`. An
environment with this package only takes less memory, because other packages may be imported indirectly (torchmetrics
imports transformers: 230 MB).
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, json_of
from benchmarks.harness.report import Report, machine, versions
from benchmarks.harness.rounds import run_rounds, spread
from benchmarks.peers.nemo_model import PRESETS

QUICK = None
CASES = {"small": (8, 10), "large": (4, 10)}
"""Number of cuts and seconds of each, by preset."""

WARM_UP = 2


def main() -> int:
    """Measures and prints the table."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"rounds": 1, "steps": 1})
    parser.add_argument("--nemo-python", required=True, help="Python of an environment with NeMo")
    parser.add_argument("--our-python", default=sys.executable, help="Python of an environment with this package")
    parser.add_argument("--steps", type=int, default=4, help="steps of each process that count [%(default)s]")
    arguments = parser.parse_args()
    ours, nemo = [arguments.our_python, PEERS / "our_steps.py"], [arguments.nemo_python, PEERS / "nemo_steps.py", "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        contestants = {}
        for preset, (num_cuts, seconds) in CASES.items():
            requests = write_requests(Path(folder), preset, num_cuts, seconds, arguments.steps)
            for side, command in (("NeMo", nemo), ("ours", ours)):
                contestants[preset, side] = partial(json_of, [*command, requests], OMP_NUM_THREADS="2")
        rounds = run_rounds(contestants, arguments.rounds, warm_up=0)
    report = Report(
        "Training steps",
        __file__,
        f"{len(rounds)} rounds, in each of which the sides alternate, {machine()}, {versions('torch')}, NeMo 3.0.0. "
        "Medians, with minimum and maximum in parentheses.",
        results=arguments.results,
    )
    report.text(f"""Each process makes {WARM_UP + arguments.steps} steps, the first {WARM_UP} of which are not counted,
        and reports the median. Both have two threads, float32, torch's fused AdamW and the same configuration.""")
    columns = ("case", "ours, s", "NeMo 3.0.0, s", "speed-up", "ours, GB", "NeMo, GB", "memory ratio, ours / NeMo")
    report.table(
        columns,
        (row(preset, *([one[preset, side] for one in rounds] for side in ("ours", "NeMo"))) for preset in CASES),
    )
    return 0


def write_requests(folder: Path, preset: str, num_cuts: int, seconds: int, num_steps: int) -> Path:
    """Writes the requests for both sides, and the audio: clean, noisy and lengths."""
    generator = torch.Generator().manual_seed(0)
    audio = 0.1 * torch.randn(num_cuts, 16000 * seconds, generator=generator)
    noisy = audio + 0.05 * torch.randn(audio.shape, generator=generator)
    torch.save([audio, noisy, torch.full((num_cuts,), audio.shape[1])], folder / f"{preset}.pt")
    requests: list[dict[str, Any]] = [
        {"do": "build", "section": PRESETS[preset], "encoder": {}, "audio": str(folder / f"{preset}.pt")},
        {"do": "steps", "warm_up": WARM_UP, "number": num_steps},
    ]
    path = folder / f"{preset}.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def row(preset: str, ours: Sequence[Any], nemo: Sequence[Any]) -> list[str]:
    """Returns the cells of a preset, given what each round measured on both sides."""
    seconds, theirs = ([statistics.median(run["step_ms"]) / 1000 for run in runs] for runs in (ours, nemo))
    num_cuts, length = CASES[preset]
    return [
        f"{preset}, {num_cuts} x {length} s",
        spread(seconds),
        spread(theirs),
        spread([b / a for a, b in zip(seconds, theirs, strict=True)]),
        *(f"{statistics.median(run['peak_gb'] for run in runs):.2f}" for runs in (ours, nemo)),
        spread([a["peak_gb"] / b["peak_gb"] for a, b in zip(ours, nemo, strict=True)], 3),
    ]


if __name__ == "__main__":
    sys.exit(main())
