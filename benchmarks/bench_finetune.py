"""Fine-tunes a recogniser from a pretrained encoder and from scratch, with all labels and with a tenth of them.

    python benchmarks/bench_finetune.py ENCODER train.json test.json OUTPUT [--quick] [--results NAME.md]

ENCODER is what `nestmodel export --to huggingface` wrote. Every run is one call of examples/finetune_ctc/finetune.py
with the same settings; the script draws their order, and gives them numbers instead of names until all are scored, so
that nobody can watch one side and favour it. If OUTPUT holds runs of an earlier call with the same settings, only the
missing ones are made.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from blind import draw_once
from kept_settings import keep_settings
from peer import run_peer

from nestmodel import count_errors, error_rate, error_reduction
from nestmodel.evaluate.error_rates import percent

FINETUNE = Path(__file__).parents[1] / "examples" / "finetune_ctc" / "finetune.py"
SHARES = {"all": 1.0, "a tenth": 0.1}
STARTS = {"pretrained": "", "from scratch": "--from-scratch"}
QUICK = "--steps 4 --batch-seconds 31 --warmup-steps 1 --freeze-steps 1"


class Run(NamedTuple):
    """One recogniser that is trained and scored."""

    start: str
    share: str
    seed: int


def main() -> int:
    """Makes the runs that are missing, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--seeds", type=int, default=2, help="runs of each kind; a seed draws labels, order and weights"
    )
    parser.add_argument("--settings", default="--steps 6000 --batch-seconds 20 --lr 0.0015 --save-steps 1000")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    parser.add_argument("--threads", default="1", help="threads of each run")
    parser.add_argument("--quick", action="store_true", help="four steps and one seed, to see that it works")
    parser.add_argument("--results", type=Path, default=Path("finetune.md"), help="Markdown file to write")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.settings, arguments.seeds = QUICK, 1
    arguments.output.mkdir(parents=True, exist_ok=True)
    kept = {name: str(getattr(arguments, name)) for name in ("encoder", "train", "test", "seeds", "settings")}
    keep_settings(arguments.output, kept)
    runs = draw_order(arguments.output / "order.json", arguments.seeds)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(lambda number: make_run(arguments, number, runs), range(len(runs))))
    arguments.results.write_text(report(arguments, runs))
    print(arguments.results)
    return 0


def draw_order(path: Path, num_seeds: int) -> list[Run]:
    """Returns the runs in the order of their directories, which is drawn once and kept in a file."""
    runs = [Run(start, share, seed) for start in STARTS for share in SHARES for seed in range(num_seeds)]
    return [Run(*run) for run in draw_once(path, runs)]


def make_run(arguments: argparse.Namespace, number: int, runs: list[Run]) -> None:
    """Trains and scores one recogniser, unless an earlier call did."""
    directory = arguments.output / f"run-{number}"
    if (directory / "results.json").exists():
        return
    start = time.perf_counter()
    run_peer(command(arguments, runs[number], directory), env={**os.environ, "OMP_NUM_THREADS": arguments.threads})
    print(f"run {number + 1} of {len(runs)}: {time.perf_counter() - start:.0f} s", flush=True)


def command(arguments: argparse.Namespace, run: Run, directory: Path) -> list[str | Path]:
    """Returns the call of the example for one run."""
    resume = ["--resume"] if any(directory.glob("checkpoints/checkpoint-*")) else []
    return [
        *(sys.executable, FINETUNE, arguments.encoder, arguments.train, arguments.test, "-o", directory),
        *("--labels", str(SHARES[run.share]), "--seed", str(run.seed)),
        *shlex.split(f"{STARTS[run.start]} {arguments.settings}"),
        *resume,
    ]


def report(arguments: argparse.Namespace, runs: list[Run]) -> str:
    """Returns the results as Markdown."""
    texts = {run: read_texts(arguments.output / f"run-{number}") for number, run in enumerate(runs)}
    results = {
        run: json.loads((arguments.output / f"run-{number}" / "results.json").read_text())
        for number, run in enumerate(runs)
    }
    num_train = {
        share: ", ".join(str(one["num_train"]) for run, one in results.items() if run[:2] == ("pretrained", share))
        for share in SHARES
    }
    num_test = next(iter(results.values()))["num_test"]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "jiwer"))
    options = "ENCODER train.json test.json -o OUTPUT"
    sections = "\n".join(
        table(texts, share, unit, arguments.seeds) for unit in ("characters", "words") for share in SHARES
    )
    return f"""# Fine-tuning from a pretrained encoder, and from scratch

Made by `benchmarks/bench_finetune.py` on {os.cpu_count()} CPU cores ({platform.machine()}),
{packages}. Every run is

    python examples/finetune_ctc/finetune.py {options} {arguments.settings}

with `--from-scratch`, `--labels 0.1` and `--seed` as the tables say: the same architecture, steps, batches and learning
rate. A seed draws the labels (the same for both starts), the order, the augmentation and new weights. The order of the
{len(runs)} runs was drawn, and runs had numbers instead of names until all were scored. Training utterances:
{"; ".join(f"labels {share}: {numbers}" for share, numbers in num_train.items())}. Test utterances: {num_test}.
Intervals are 95 % bootstrap intervals over test utterances; the reduction is 1 - pretrained / from scratch, with
pairs of the same utterances. A pretrained encoder is frozen for the first steps (`--freeze-steps`), a new one is not.
A rate of 100 % of which all are deletions is that of a recogniser that writes nothing yet.

{sections}
"""


def read_texts(directory: Path) -> tuple[list[str], list[str]]:
    """Returns the transcripts of the test utterances and what was recognised."""
    lines = [json.loads(line) for line in (directory / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["text"] for line in lines], [line["recognised"] for line in lines]


def table(texts: dict[Run, tuple[list[str], list[str]]], share: str, unit: Any, num_seeds: int) -> str:
    """Returns the error rates with one share of the labels: a row for each seed, and one for all seeds together."""
    counts = {run: count_errors(*pair, unit) for run, pair in texts.items() if run.share == share}
    rows, sums = [], {}
    for start in STARTS:
        of_seeds = [counts[Run(start, share, seed)] for seed in range(num_seeds)]
        sums[start] = of_seeds[0]
        for one in of_seeds[1:]:
            sums[start] += one
    pairs = {str(seed): {start: counts[Run(start, share, seed)] for start in STARTS} for seed in range(num_seeds)}
    for name, pair in {**pairs, **({"all": sums} if num_seeds > 1 else {})}.items():
        rates = [error_rate(pair[start]) for start in STARTS]
        reduction = error_reduction(pair["pretrained"], pair["from scratch"])
        kinds = [f"{rate.insertions} / {rate.deletions} / {rate.substitutions}" for rate in rates]
        rows.append(f"| {name} | {' | '.join(map(percent, (*rates, reduction)))} | {' | '.join(kinds)} |")
    lines = "\n".join(rows)
    return f"""## Errors in {unit}, labels: {share}

Errors in % of the {unit} of the transcripts; the last columns count insertions / deletions / substitutions.

| seed | pretrained | from scratch | reduction, % | kinds, pretrained | kinds, from scratch |
|---|---|---|---|---|---|
{lines}
"""


if __name__ == "__main__":
    sys.exit(main())
