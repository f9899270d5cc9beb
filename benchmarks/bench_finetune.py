"""Fine-tunes a recogniser from pretrained encoders and from scratch, with all labels and with a tenth of them.

    python benchmarks/bench_finetune.py train.json test.json OUTPUT --group-by scene --seeds 3
        --start "pretrained=encoder-{seed}"
        --start "from scratch=encoder-0 --from-scratch"
        --start "from scratch, four times the steps=encoder-0 --from-scratch --steps 24000"

A start is a name, an encoder that `nestmodel export --to huggingface` wrote, and options of its own; `{seed}` stands
for the number of the seed. Every run is one call of examples/finetune_ctc/finetune.py. The script draws their order,
and gives them numbers instead of names until all are scored, so that nobody can watch one side and favour it. The first
start is compared with each of the others. If OUTPUT holds runs of an earlier call with the same settings, only the
missing ones are made. A recogniser for live speech has a row for each of its attention contexts.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from importlib.metadata import version
from itertools import groupby
from operator import add
from pathlib import Path
from typing import NamedTuple

from blind import draw_once
from kept_settings import keep_settings
from measured import measured_line
from peer import run_peer
from transcribed import read_lines

from nestdata import Corpus
from nestmodel import ErrorCounts, count_errors, error_rate, error_reduction
from nestmodel.evaluate.error_rates import ErrorUnit, percent
from nestmodel.evaluate.features.inputs import cut_labels

FINETUNE = Path(__file__).parents[1] / "examples" / "finetune_ctc" / "finetune.py"
UNITS: tuple[ErrorUnit, ...] = ("characters", "words")
SHARES = {"all": 1.0, "a tenth": 0.1}
QUICK = "--steps 4 --batch-seconds 31 --warmup-steps 1 --freeze-steps 1"


class Run(NamedTuple):
    """One recogniser that is trained and scored."""

    start: str
    share: str
    seed: int


def main() -> int:
    """Makes the runs that are missing, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--start", action="append", required=True, metavar="NAME=ENCODER [OPTIONS]")
    parser.add_argument("--shares", default=",".join(SHARES), help="shares of the labels, separated by commas")
    parser.add_argument("--group-by", required=True, help="field of the test lines: intervals draw whole groups")
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
    arguments.start = dict(one.split("=", 1) for one in arguments.start)
    arguments.shares = arguments.shares.split(",")
    kept = {name: str(getattr(arguments, name)) for name in ("start", "shares", "train", "test", "seeds", "settings")}
    keep_settings(arguments.output, kept)
    runs = draw_order(arguments)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(lambda number: make_run(arguments, number, runs), range(len(runs))))
    arguments.results.write_text(report(arguments, runs))
    print(arguments.results)
    return 0


def draw_order(arguments: argparse.Namespace) -> list[Run]:
    """Returns the runs in the order of their directories, which is drawn once and kept in a file."""
    seeds = range(arguments.seeds)
    runs = [Run(start, share, seed) for start in arguments.start for share in arguments.shares for seed in seeds]
    return [Run(*run) for run in draw_once(arguments.output / "order.json", runs)]


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
        *(sys.executable, FINETUNE, encoder, arguments.train, arguments.test, "-o", directory),
        *("--labels", str(SHARES[run.share]), "--seed", str(run.seed)),
        *(*shlex.split(arguments.settings), *options),  # of the same option, the last one counts
        *resume,
    ]


def report(arguments: argparse.Namespace, runs: list[Run]) -> str:
    """Returns the results as Markdown."""
    errors = {run: read_errors(arguments, arguments.output / f"run-{number}") for number, run in enumerate(runs)}
    results = [json.loads((arguments.output / f"run-{i}" / "results.json").read_text()) for i in range(len(runs))]
    num_train = {
        share: ", ".join(
            sorted({str(one["num_train"]) for run, one in zip(runs, results, strict=True) if run.share == share})
        )
        for share in arguments.shares
    }
    scored = results[0].get("contexts", {"": results[0]})
    num_test = next(iter(scored.values()))["num_test"]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "jiwer"))
    measured = measured_line(
        "benchmarks/bench_finetune.py", "examples/finetune_ctc/finetune.py", "nestmodel/evaluate/error_rates.py"
    )
    starts = "\n".join(
        f"- {name}: `{' '.join(['ENCODER', *each.split()[1:]])}`" for name, each in arguments.start.items()
    )
    sections = "\n".join(table(arguments, errors, share, unit) for unit in UNITS for share in arguments.shares)
    return f"""# Fine-tuning from pretrained encoders, and from scratch

Made by `benchmarks/bench_finetune.py` on {os.cpu_count()} CPU cores ({platform.machine()}) with other work, each run
with OMP_NUM_THREADS={arguments.threads}, {packages}.
{measured}

Every run is

    python examples/finetune_ctc/finetune.py ENCODER train.json test.json -o OUTPUT {arguments.settings}

with `--labels`, `--seed` and the options of its start:

{starts}

A seed draws the labels (the same for all starts), the order, the augmentation and new weights; each seed has an encoder
of its own where the start says `{{seed}}`. The order of the {len(runs)} runs was drawn, and runs had numbers instead of
names until all were scored. Training utterances:
{"; ".join(f"labels {share}: {numbers}" for share, numbers in num_train.items())}.
Test utterances: {num_test}.
Intervals are 95 % bootstrap intervals that draw whole groups of `{arguments.group_by}`; the reduction is
1 - {next(iter(arguments.start))} / other start, with pairs of the same groups. A pretrained encoder is frozen for the
first steps (`--freeze-steps`), a new one is not. A rate near 100 % of which nearly all are deletions is that of a
recogniser that writes next to nothing yet.

{sections}
"""


def read_errors(arguments: argparse.Namespace, directory: Path) -> dict[tuple[str, str], ErrorCounts]:
    """Returns the errors of a recogniser by group of test utterances.

    Keys are an attention context, empty for a recogniser of recordings, and `characters` or `words`.
    """
    corpus = Corpus.open(directory / "test.corpus")
    cuts = map(corpus.line, range(len(corpus)))
    groups = {cut["id"]: str(cut_labels(cut)[arguments.group_by]) for cut in cuts}
    errors = {}
    for context, found in groupby(read_lines(directory / "test.jsonl"), lambda line: str(line.get("context", ""))):
        of_context = list(found)
        texts = [[line[name] for line in of_context] for name in ("text", "recognised")]
        of_lines = [groups[line["id"]] for line in of_context]
        for unit in UNITS:
            errors[context, unit] = count_errors(texts[0], texts[1], unit).by_group(of_lines)
    return errors


def table(
    arguments: argparse.Namespace, errors: dict[Run, dict[tuple[str, str], ErrorCounts]], share: str, unit: str
) -> str:
    """Returns the error rates with one share of the labels: a row for each start and seed, and one for all seeds.

    All are compared with the first start, in its first context.
    """
    seeds = range(arguments.seeds)
    first = next(iter(arguments.start))
    contexts = {
        start: [context for context, one in errors[Run(start, share, 0)] if one == unit] for start in arguments.start
    }

    def by_seed(start: str, context: str) -> dict[str, ErrorCounts]:
        counts = {str(seed): errors[Run(start, share, seed)][context, unit] for seed in seeds}
        return {**counts, "all": reduce(add, counts.values())}

    others = by_seed(first, contexts[first][0])
    rows = []
    for start in arguments.start:
        for context in contexts[start]:
            for name, one in by_seed(start, context).items():
                rate = error_rate(one)
                reduction = "" if start == first else percent(error_reduction(others[name], one))
                kinds = f"{rate.insertions} / {rate.deletions} / {rate.substitutions}"
                shown = f"{start}, {context}" if context else start
                rows.append(f"| {shown} | {name} | {percent(rate)} | {kinds} | {reduction} |")
    lines = "\n".join(rows)
    return f"""## Errors in {unit}, labels: {share}

In % of the {unit} of the transcripts.

| start | seed | errors | insertions / deletions / substitutions | fewer errors with "{first}", % |
|---|---|---|---|---|
{lines}
"""


if __name__ == "__main__":
    sys.exit(main())
