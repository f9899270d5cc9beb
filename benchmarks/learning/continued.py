"""Continues the pretraining of a checkpoint on another language, and measures both languages before and after.

    python -m benchmarks run continued OUTPUT --start 0.ckpt 1.ckpt --new new.corpus --old old.corpus
        --noise noise.corpus --language "old=old_train.json,old_test.json" --language "new=new_train.json,new_test.json"
        --group-by scene

Each start is an encoder that was pretrained with another seed; its index in the list is also the seed of the
continuation. For each start, there is one run of `nestmodel fit --init-from` for every combination of a share of
replayed old audio (`--replay`; 1 is the control, without new audio) and a factor of the learning rate (`--lr`). A head
then reads characters of each language from the frozen encoders, before and after. Runs have numbers in a drawn order
instead of names until all are scored. A call that was interrupted continues after the last complete run; remove the
folder of an incomplete one. `--quick` checks that everything runs.
"""

import argparse
import hashlib
import shlex
import sys
import time
from collections.abc import Mapping
from functools import reduce
from operator import add
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import run_command
from benchmarks.harness.kept_settings import draw_once, keep_settings
from benchmarks.harness.report import machine, table_text, versions
from benchmarks.harness.repository import commit_line
from benchmarks.learning.pretraining import read_lines, read_manifest, write_lines
from nestmodel import ErrorCounts, count_errors, error_difference, error_rate
from nestmodel.evaluate.error_rates import percent

QUICK = None
QUICK_LINES = {"train": 60, "test": 20}
"""Lines of each side of a language with `--quick`, evenly spread."""

FEW = {"steps": 2, "warmup_steps": 1, "probe_options": "--max-epochs 1 --learning-rates 0.08 --probe-seeds 0"}


class Run(NamedTuple):
    """One continuation."""

    seed: int
    """Number of the encoder that it starts from, and seed of the continuation."""

    replay: float = 0.0
    """Share of old audio in the hours of an epoch."""

    lr: float = 0.0
    """Factor of the Noam schedule; 0 is the encoder before."""

    @property
    def variant(self) -> str:
        """Name in the tables."""
        return f"replay {self.replay:g}, lr {self.lr:g}" if self.lr else "before"


def main() -> int:
    """Makes the runs that are missing, and writes the results."""
    arguments = _arguments()
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    kept = {name: str(value) for name, value in vars(arguments).items() if name not in ("output", "results")}
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in arguments.start]
    keep_settings(output, {**kept, "start": " ".join(digests)})
    for name, *paths in arguments.language:
        for (side, limit), path in zip(QUICK_LINES.items(), paths, strict=True):
            lines = read_manifest(Path(path))
            kept_lines = lines[:: max(1, len(lines) // limit)][:limit] if arguments.quick else lines
            write_lines(output / f"{name}-{side}.json", kept_lines)
    seeds = range(len(arguments.start))
    continued = [Run(seed, replay, lr) for replay in arguments.replay for lr in arguments.lr for seed in seeds]
    runs = [*map(Run, seeds), *continued]
    order = [Run(*run) for run in draw_once(output / "order.json", runs)]
    for number, run in enumerate(order):
        began = time.monotonic()
        checkpoint = _continue(arguments, output / f"run-{number}", run) if run.lr else arguments.start[run.seed]
        for name, *_ in arguments.language:
            probe = f"probe-{number}-{name}"
            if not (output / probe / "probe.json").exists():
                run_command(
                    f"nestmodel probe characters {shlex.quote(str(checkpoint))} {name}-train.json "
                    f"--test {name}-test.json --group-by {arguments.group_by} {arguments.probe_options} "
                    f"--overwrite -o {probe}",
                    output,
                )
        print(f"run {number + 1} of {len(order)}: {time.monotonic() - began:.0f} s", flush=True)
    numbers = {run: order.index(run) for run in runs}
    arguments.results.write_text(_report(arguments, numbers), encoding="utf-8")
    print(arguments.results)
    return 0


def _arguments() -> argparse.Namespace:
    """Returns the arguments of the command line, with absolute paths."""
    parser = benchmark_parser(__doc__, quick=FEW)
    parser.set_defaults(results=Path("continued.md"))
    option = parser.add_argument
    option("output", type=Path)
    option(
        "--start", type=Path, nargs="+", required=True, help="checkpoints or .nemo files to start from, one for a seed"
    )
    option("--new", type=Path, required=True, help="corpus of the new audio")
    option("--old", type=Path, required=True, help="corpus of the old audio, or of a part of it")
    option("--noise", type=Path, required=True, help="corpus of noise")
    option("--language", type=language, action="append", required=True, metavar="NAME=TRAIN,TEST")
    option("--probe-options", default="--learning-rates 0.08 --probe-seeds 0")
    option("--group-by", required=True, help="field of the lines whose values are drawn for the intervals")
    option("--replay", type=float, nargs="+", default=[0.0, 0.25, 0.5, 1.0], help="shares of the old audio")
    option("--lr", type=float, nargs="+", default=[0.03, 0.12], help="factors of the Noam schedule")
    option("--steps", type=int, default=300, help="steps of a continuation")
    option("--warmup-steps", type=int, default=50)
    option("--config", default="demo", help="preset or file of the model")
    option("--fit-options", default="", help="further flags of `nestmodel fit`")
    arguments = parser.parse_args()
    arguments.start = [path.absolute() for path in arguments.start]
    for name in ("output", "new", "old", "noise"):
        setattr(arguments, name, getattr(arguments, name).absolute())
    return arguments


def language(text: str) -> tuple[str, str, str]:
    """Returns the name and both absolute paths of `NAME=TRAIN,TEST`."""
    name, _, paths = text.partition("=")
    train, _, test = paths.partition(",")
    if not (name.isidentifier() and train and test) or "," in test:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=TRAIN,TEST, with a name of letters and digits")
    return name, str(Path(train).absolute()), str(Path(test).absolute())


def _continue(arguments: argparse.Namespace, directory: Path, run: Run) -> Path:
    """Returns the last checkpoint of a continuation, which is made unless it is complete."""
    checkpoint = directory / "version_0" / "checkpoints" / "last.ckpt"
    if (directory / "complete").exists():
        return checkpoint
    if directory.exists():
        raise SystemExit(f"{directory}: an incomplete run of an earlier call. Remove the directory.")
    corpora: list[str | Path] = [arguments.old if run.replay == 1 else arguments.new]
    if 0 < run.replay < 1:
        corpora += [arguments.old, "--weights", f"{1 - run.replay}", f"{run.replay}"]
    paths = shlex.join(map(str, [*corpora, "--noise", arguments.noise, "--init-from", arguments.start[run.seed]]))
    run_command(
        f"nestmodel fit {paths} --config {shlex.quote(arguments.config)} --seed {run.seed} --lr {run.lr} "
        f"--warmup-steps {arguments.warmup_steps} --max-steps {arguments.steps} --accelerator cpu --devices 1 --quiet "
        f"-o {shlex.quote(str(directory))} {arguments.fit_options}"
    )
    (directory / "complete").touch()
    return checkpoint


def _report(arguments: argparse.Namespace, numbers: Mapping[Run, int]) -> str:
    """Returns the results as Markdown."""
    tables = []
    for name, *_ in arguments.language:
        errors: dict[str, dict[int, ErrorCounts]] = {}
        for run, number in numbers.items():
            path = arguments.output / f"probe-{number}-{name}" / "hypotheses.jsonl"
            errors.setdefault(run.variant, {})[run.seed] = _read_errors(path)
        columns = ["variant", "CER", "CER by seed of pretraining", "minus before", "minus before, by seed"]
        rows = (_row(variant, by_seed, errors["before"]) for variant, by_seed in errors.items())
        tables.append(f"## {name}\n\n{table_text(columns, rows)}\n")
    script = "benchmarks/learning/continued.py"
    return f"""# Continued pretraining

{commit_line()}

Made by `{script}`{" --quick" if arguments.quick else ""} on {machine("CPU cores")} with other work, \
{versions("torch", "jiwer")}.
{arguments.steps} steps with the preset `{arguments.config}`, a warm-up of {arguments.warmup_steps} steps, \
further flags: {arguments.fit_options or "none"}; heads with `{arguments.probe_options}`. Rates in %, differences in
percentage points, with 95 % bootstrap intervals over groups of `{arguments.group_by}`, which do not cover
seeds. Runs had numbers in a drawn order until all were scored. Replay 1 is the control: the same steps on old audio
alone.

{chr(10).join(tables)}"""


def _read_errors(path: Path) -> ErrorCounts:
    """Returns the errors in characters of heads on the encoder, added up over their seeds and over groups of lines.

    Args:
        path: The file `hypotheses.jsonl` of a probe.
    """
    lines = sorted(read_lines(path), key=lambda line: str(line["id"]))
    texts, by_seed = [line["text"] for line in lines], [line["trained"] for line in lines]
    counts = (count_errors(texts, [one[seed] for one in by_seed], "characters") for seed in by_seed[0])
    return reduce(add, counts).by_group([line["group"] for line in lines])


def _row(variant: str, errors: Mapping[int, ErrorCounts], before: Mapping[int, ErrorCounts]) -> list[str]:
    singles = ", ".join(f"{seed}: {100 * error_rate(counts).rate:.1f}" for seed, counts in errors.items())
    cells = [variant, percent(error_rate(reduce(add, errors.values()))), singles]
    if errors is before:
        return [*cells, "", ""]
    together = error_difference(reduce(add, errors.values()), reduce(add, before.values()))
    apart = (f"{seed}: {100 * error_difference(errors[seed], before[seed]).value:.1f}" for seed in errors)
    return [*cells, percent(together), ", ".join(apart)]


if __name__ == "__main__":
    sys.exit(main())
