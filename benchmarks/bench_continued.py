"""Continues the pretraining of a checkpoint on another language, and measures both languages before and after.

    python benchmarks/bench_continued.py start.ckpt OUTPUT --new new.corpus --old old.corpus --noise noise.corpus
        --language "old=old_train.json,old_test.json" --language "new=new_train.json,new_test.json" --group-by scene

Every combination of a share of replayed old audio (`--replay`) and a factor of the learning rate (`--lr`) is one run of
`nestmodel fit --init-from`. A linear head then reads characters of each language from the frozen encoders and from the
one that they started from. Runs have numbers in a drawn order instead of names until all are scored. A call that was
interrupted goes on where it ended; `--quick` checks that everything runs.
"""

import argparse
import hashlib
import os
import platform
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from bench_learning import environment
from blind import draw_once
from kept_settings import keep_settings
from measured import measured_line
from peer import run_peer
from transcribed import add_languages, read_errors, read_manifest, write_lines

from nestmodel import ErrorCounts, error_difference, error_rate
from nestmodel.evaluate.error_rates import percent

QUICK = {"steps": 2, "warmup_steps": 1, "probe_options": "--max-epochs 1 --learning-rates 0.08 --probe-seeds 0"}
QUICK_LINES = 40


class Run(NamedTuple):
    """One continuation; the first one, of no steps, is the encoder before."""

    replay: float
    """Share of old audio in the hours of an epoch."""

    lr: float
    """Factor of the Noam schedule; 0 without a continuation."""


BEFORE = Run(0.0, 0.0)


def main() -> int:
    """Makes the runs that are missing, and writes the results."""
    arguments = parse_arguments()
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    kept = {name: str(value) for name, value in vars(arguments).items() if name not in ("output", "results")}
    keep_settings(output, {**kept, "start": hashlib.sha256(arguments.start.read_bytes()).hexdigest()})
    for name, train, test in arguments.language:
        for side, path in (("train", train), ("test", test)):
            lines = read_manifest(Path(path), QUICK_LINES if arguments.quick else 0)
            write_lines(output / f"{name}-{side}.json", lines)
    runs = [BEFORE, *(Run(replay, lr) for replay in arguments.replay for lr in arguments.lr)]
    order = [Run(*run) for run in draw_once(output / "order.json", runs)]
    for number, run in enumerate(order):
        began = time.monotonic()
        checkpoint = arguments.start if run == BEFORE else continue_run(arguments, output / f"run-{number}", run)
        for language, *_ in arguments.language:
            probe(arguments, checkpoint, output, number, language)
        print(f"run {number + 1} of {len(order)}: {time.monotonic() - began:.0f} s", flush=True)
    numbers = {run: order.index(run) for run in runs}
    arguments.results.write_text(report(arguments, numbers), encoding="utf-8")
    print(arguments.results)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line, with absolute paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("start", type=Path, help="checkpoint or .nemo file to start from")
    add("output", type=Path)
    add("--new", type=Path, required=True, help="corpus of the new audio")
    add("--old", type=Path, required=True, help="corpus of the old audio, or of a part of it")
    add("--noise", type=Path, required=True, help="corpus of noise")
    add_languages(parser, "--language", required=True)
    add("--group-by", required=True, help="field of the lines whose values are drawn for the intervals")
    add("--replay", type=float, nargs="+", default=[0.0, 0.25, 0.5], help="shares of the old audio")
    add("--lr", type=float, nargs="+", default=[0.03, 0.12], help="factors of the Noam schedule")
    add("--steps", type=int, default=300, help="steps of a continuation")
    add("--warmup-steps", type=int, default=50)
    add("--config", default="demo", help="preset or file of the model")
    add("--fit-options", default="", help="further flags of `nestmodel fit`")
    add("--probe-options", default="--learning-rates 0.08 --probe-seeds 0", help="flags of `nestmodel probe`")
    add("--results", type=Path, default=Path("continued.md"), help="Markdown file to write")
    add("--quick", action="store_true", help="few lines and steps, to check the script")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    for name in ("start", "output", "new", "old", "noise"):
        setattr(arguments, name, getattr(arguments, name).absolute())
    return arguments


def continue_run(arguments: argparse.Namespace, directory: Path, run: Run) -> Path:
    """Returns the last checkpoint of a continuation, which is made unless it is complete."""
    checkpoint = directory / "version_0" / "checkpoints" / "last.ckpt"
    if (directory / "complete").exists():
        return checkpoint
    if directory.exists():
        raise SystemExit(f"{directory}: an incomplete run of an earlier call. Remove the directory.")
    corpora: list[str | Path] = [arguments.new]
    if run.replay:
        corpora += [arguments.old, "--weights", f"{1 - run.replay},{run.replay}"]
    fit = ["nestmodel", "fit", *corpora, "--noise", arguments.noise, "--config", arguments.config]
    fit += ["--init-from", arguments.start, "--lr", str(run.lr), "--warmup-steps", str(arguments.warmup_steps)]
    fit += ["--max-steps", str(arguments.steps), "--accelerator", "cpu", "--devices", "1", "--quiet", "-o", directory]
    run_peer([*fit, *shlex.split(arguments.fit_options)], env=environment())
    (directory / "complete").touch()
    return checkpoint


def probe(arguments: argparse.Namespace, checkpoint: Path, output: Path, number: int, language: str) -> None:
    """Scores an encoder on one language, unless an earlier call did."""
    if (output / f"probe-{number}-{language}" / "probe.json").exists():
        return
    manifests = [f"{language}-train.json", "--test", f"{language}-test.json"]
    command = ["nestmodel", "probe", checkpoint, *manifests, "--task", "ctc", "--baselines", "none"]
    command += ["--group-by", arguments.group_by, *shlex.split(arguments.probe_options)]
    run_peer([*command, "-o", f"probe-{number}-{language}"], cwd=output, env=environment())


def report(arguments: argparse.Namespace, numbers: dict[Run, int]) -> str:
    """Returns the results as Markdown."""
    names = [language for language, *_ in arguments.language]
    errors = {
        (run, language): read_errors(arguments.output / f"probe-{number}-{language}")
        for run, number in numbers.items()
        for language in names
    }
    columns = [cell for name in names for cell in (f"{name}: CER", f"{name}: minus before")]
    lines = [f"| replay of old audio | lr | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for run in numbers:
        name = "before |" if run == BEFORE else f"{run.replay:g} | {run.lr:g}"
        cells = [cell for one in names for cell in cells_of(errors[run, one], errors[BEFORE, one])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jiwer"))
    heads = [f"nestmodel/evaluate/probe/{name}.py" for name in ("ctc_head", "training")]
    measured = measured_line("benchmarks/bench_continued.py", "nestmodel/nn", *heads)
    return f"""# Continued pretraining

{measured}

Made by `benchmarks/bench_continued.py`{" --quick" if arguments.quick else ""} on {os.cpu_count()} CPU cores \
({platform.machine()}) with other work, one seed of the continuations, {packages}.
{arguments.steps} steps with the preset `{arguments.config}`, a warm-up of {arguments.warmup_steps} steps, \
further flags: {arguments.fit_options or "none"}; heads with `{arguments.probe_options}`. Rates in %, differences in
percentage points, with 95 % bootstrap intervals over groups of `{arguments.group_by}`; they do not cover the choice of
the seed. Runs had numbers in a drawn order until all were scored.

{table}
"""


def cells_of(errors: ErrorCounts, before: ErrorCounts) -> list[str]:
    """Returns the error rate of an encoder and its difference from that of the encoder before."""
    difference = "" if errors is before else percent(error_difference(errors, before))
    return [percent(error_rate(errors)), difference]


if __name__ == "__main__":
    sys.exit(main())
