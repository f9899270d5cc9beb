"""Fine-tunes a recogniser from pretrained encoders and from scratch, with all labels and with a tenth of them.

    python -m benchmarks run finetune train.json test.json OUTPUT --group-by scene --seeds 3
        --start "pretrained=encoder-{seed}"
        --start "from scratch=encoder-0 --from-scratch"
        --start "from scratch, four times the steps=encoder-0 --from-scratch --steps 24000"

A start is a name, an encoder that `nestmodel export --to huggingface` wrote, and options of its own; `{seed}` stands
for the number of the seed. Every run is one call of examples/finetune_ctc/finetune.py. The script draws their order,
and gives them numbers instead of names until all are scored, so that nobody can watch one side and favour it. The first
start is compared with each of the others. If OUTPUT holds runs of an earlier call with the same settings, only the
missing ones are made.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import product
from operator import add
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import run_peer
from benchmarks.harness.kept_settings import draw_once, keep_settings
from benchmarks.harness.report import machine, table_text, versions
from benchmarks.harness.repository import REPOSITORY, commit_line
from benchmarks.learning.pretraining import read_lines
from nestdata import Corpus
from nestmodel import ErrorCounts, Estimate, count_errors, error_rate
from nestmodel.evaluate.error_rates import ErrorUnit, bootstrap, percent
from nestmodel.evaluate.inputs import cut_labels

QUICK = None
EXAMPLE = "examples/finetune_ctc/finetune.py"
UNITS: tuple[ErrorUnit, ...] = ("characters", "words")
SHARES = {"all": 1.0, "a tenth": 0.1}
FEW = {"settings": "--steps 4 --batch-seconds 31 --warmup-steps 1 --freeze-steps 1", "seeds": 1}


class Run(NamedTuple):
    """One recogniser that is trained and scored."""

    start: str
    share: str
    seed: int


Errors = Mapping[str, ErrorCounts]
"""Errors of a recogniser in `characters` and in `words`."""


def main() -> int:
    """Makes the runs that are missing, and writes the results."""
    parser = benchmark_parser(__doc__, quick=FEW)
    parser.set_defaults(results=Path("finetune.md"))
    add = parser.add_argument
    add("train", type=Path)
    add("test", type=Path)
    add("output", type=Path)
    add("--start", action="append", required=True, metavar="NAME=ENCODER [OPTIONS]")
    add("--shares", default=",".join(SHARES), help="shares of the labels, separated by commas")
    add("--group-by", required=True, help="field of the test lines: intervals draw whole groups")
    add("--seeds", type=int, default=2, help="runs of each kind; a seed draws labels, order and weights")
    add("--settings", default="--steps 6000 --batch-seconds 20 --lr 0.0015 --save-steps 1000")
    add("--at-once", type=int, default=2, help="runs at the same time")
    add("--threads", default="1", help="threads of each run")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    arguments.start = dict(one.split("=", 1) for one in arguments.start)
    arguments.shares = arguments.shares.split(",")
    kept = {name: str(getattr(arguments, name)) for name in ("start", "shares", "train", "test", "seeds", "settings")}
    keep_settings(arguments.output, kept)
    kinds = [Run(*kind) for kind in product(arguments.start, arguments.shares, range(arguments.seeds))]
    runs = [Run(*run) for run in draw_once(arguments.output / "order.json", kinds)]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(lambda number: make_run(arguments, number, runs), range(len(runs))))
    arguments.results.write_text(report(arguments, runs))
    print(arguments.results)
    return 0


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
    encoder, *options = shlex.split(arguments.start[run.start].format(seed=run.seed))
    return [
        *(sys.executable, REPOSITORY / EXAMPLE, encoder, arguments.train, arguments.test, "-o", directory),
        *("--labels", str(SHARES[run.share]), "--seed", str(run.seed)),
        *(*shlex.split(arguments.settings), *options),  # of the same option, the last one counts
        *resume,
    ]


def report(arguments: argparse.Namespace, runs: list[Run]) -> str:
    """Returns the results as Markdown."""
    folders = [arguments.output / f"run-{number}" for number in range(len(runs))]
    errors = {run: read_errors(folder, arguments.group_by) for run, folder in zip(runs, folders, strict=True)}
    results = [json.loads((folder / "results.json").read_text()) for folder in folders]
    trained = {(run.share, str(one["num_train"])) for run, one in zip(runs, results, strict=True)}
    num_train = "; ".join(
        f"labels {share}: {', '.join(sorted(number for of, number in trained if of == share))}"
        for share in arguments.shares
    )
    num_test = results[0]["num_test"]
    script, first = "benchmarks/learning/finetune.py", next(iter(arguments.start))
    starts = "\n".join(
        f"- {name}: `{' '.join(['ENCODER', *each.split()[1:]])}`" for name, each in arguments.start.items()
    )
    columns = ["start", "seed", "errors", "insertions / deletions / substitutions", f'fewer errors with "{first}", %']
    sections = "\n".join(
        f"## Errors in {unit}, labels: {share}\n\nIn % of the {unit} of the transcripts.\n\n"
        + table_text(columns, rows_of({run: errors[run] for run in errors if run.share == share}, arguments, unit))
        + "\n"
        for unit in UNITS
        for share in arguments.shares
    )
    return f"""# Fine-tuning from pretrained encoders, and from scratch

Made by `{script}` on {machine("CPU cores")} with other work, each run
with OMP_NUM_THREADS={arguments.threads}, {versions("torch", "transformers", "accelerate", "jiwer")}.
{commit_line()}

Every run is

    python {EXAMPLE} ENCODER train.json test.json -o OUTPUT {arguments.settings}

with `--labels`, `--seed` and the options of its start:

{starts}

A seed draws the labels (the same for all starts), the order, the augmentation and new weights; each seed has an encoder
of its own where the start says `{{seed}}`. The order of the {len(runs)} runs was drawn, and runs had numbers instead of
names until all were scored. Training utterances:
{num_train}.
Test utterances: {num_test}.
Intervals are 95 % bootstrap intervals that draw whole groups of `{arguments.group_by}`; the reduction is
1 - {first} / other start, with pairs of the same groups. A pretrained encoder is frozen for the
first steps (`--freeze-steps`), a new one is not. A rate near 100 % with nearly only deletions means that the recogniser
does not yet write much.

{sections}
"""


def read_errors(directory: Path, group_by: str) -> Errors:
    """Returns the errors of a recogniser, added up over the groups of test utterances."""
    corpus = Corpus.open(directory / "test.corpus")
    cuts = map(corpus.line, range(len(corpus)))
    groups = {cut["id"]: str(cut_labels(cut)[group_by]) for cut in cuts}
    lines = read_lines(directory / "test.jsonl")
    texts = [[line[name] for line in lines] for name in ("text", "recognised")]
    of_lines = [groups[line["id"]] for line in lines]
    return {unit: count_errors(texts[0], texts[1], unit).by_group(of_lines) for unit in UNITS}


def rows_of(errors: Mapping[Run, Errors], arguments: argparse.Namespace, unit: str) -> Iterator[list[str]]:
    """Returns the error rates with one share of the labels: a row for each start and seed, and one for all seeds.

    All are compared with the first start.
    """
    by_start: dict[str, dict[str, ErrorCounts]] = {start: {} for start in arguments.start}
    for run in sorted(errors, key=lambda run: run.seed):
        by_start[run.start][str(run.seed)] = errors[run][unit]
    for by_seed in by_start.values():
        by_seed["all"] = reduce(add, by_seed.values())
    first = next(iter(by_start))
    for start, by_seed in by_start.items():
        for seed, counts in by_seed.items():
            rate = error_rate(counts)
            kinds = f"{rate.insertions} / {rate.deletions} / {rate.substitutions}"
            reduction = "" if start == first else percent(error_reduction(by_start[first][seed], counts))
            yield [start, seed, percent(rate), kinds, reduction]


def error_reduction(counts: ErrorCounts, baseline: ErrorCounts) -> Estimate:
    """Returns the share of a baseline's errors that is avoided, 1 - rate / rate of the baseline.

    A draw without errors of the baseline counts as if it had one.
    """

    def reduction(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        baseline_rate: NDArray[np.float64] = np.maximum(sums[2], 1) / sums[3]
        rate: NDArray[np.float64] = sums[0] / sums[1]
        return 1 - rate / baseline_rate

    columns = (counts.errors, counts.num_reference, baseline.errors, baseline.num_reference)
    return bootstrap(reduction, columns, seed=0)


if __name__ == "__main__":
    sys.exit(main())
