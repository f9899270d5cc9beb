"""Continues the pretraining of a checkpoint on another language, and measures both languages before and after.

    python benchmarks/bench_continued.py OUTPUT --start 0.ckpt 1.ckpt --new new.corpus --old old.corpus
        --noise noise.corpus --language "old=old_train.json,old_test.json" --language "new=new_train.json,new_test.json"
        --group-by scene --purpose figures

Every combination of a share of replayed old audio (`--replay`; 1 is the control, which hears nothing new) and a factor
of the learning rate (`--lr`) is one run of `nestmodel fit --init-from` for each start, an encoder of another seed of
pretraining, whose place in the list is also the seed of the continuation. A head then reads characters of each language
from the frozen encoders and from the one that they started from. Runs have numbers in a drawn order instead of names
until all are scored. A call that was interrupted goes on where it ended; `--quick` checks that everything runs.
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
from transcribed import PURPOSES, add_languages, read_errors, read_manifest, variant_table, write_lines

QUICK = {"steps": 2, "warmup_steps": 1, "probe_options": "--max-epochs 1 --learning-rates 0.08 --probe-seeds 0"}
QUICK_LINES = 40


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
    arguments = parse_arguments()
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    kept = {name: str(value) for name, value in vars(arguments).items() if name not in ("output", "results")}
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in arguments.start]
    keep_settings(output, {**kept, "start": " ".join(digests)})
    for name, train, test in arguments.language:
        for side, path in (("train", train), ("test", test)):
            lines = read_manifest(Path(path), QUICK_LINES if arguments.quick else 0)
            write_lines(output / f"{name}-{side}.json", lines)
    seeds = range(len(arguments.start))
    continued = [Run(seed, replay, lr) for replay in arguments.replay for lr in arguments.lr for seed in seeds]
    runs = [*map(Run, seeds), *continued]
    order = [Run(*run) for run in draw_once(output / "order.json", runs)]
    for number, run in enumerate(order):
        began = time.monotonic()
        checkpoint = continue_run(arguments, output / f"run-{number}", run) if run.lr else arguments.start[run.seed]
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
    add("output", type=Path)
    add("--start", type=Path, nargs="+", required=True, help="checkpoints or .nemo files to start from, one for a seed")
    add("--new", type=Path, required=True, help="corpus of the new audio")
    add("--old", type=Path, required=True, help="corpus of the old audio, or of a part of it")
    add("--noise", type=Path, required=True, help="corpus of noise")
    add_languages(parser, "--language", required=True)
    add("--group-by", required=True, help="field of the lines whose values are drawn for the intervals")
    add("--purpose", choices=PURPOSES, required=True, help="what the test lines are used for")
    add("--replay", type=float, nargs="+", default=[0.0, 0.25, 0.5, 1.0], help="shares of the old audio")
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
    arguments.start = [path.absolute() for path in arguments.start]
    for name in ("output", "new", "old", "noise"):
        setattr(arguments, name, getattr(arguments, name).absolute())
    return arguments


def continue_run(arguments: argparse.Namespace, directory: Path, run: Run) -> Path:
    """Returns the last checkpoint of a continuation, which is made unless it is complete."""
    checkpoint = directory / "version_0" / "checkpoints" / "last.ckpt"
    if (directory / "complete").exists():
        return checkpoint
    if directory.exists():
        raise SystemExit(f"{directory}: an incomplete run of an earlier call. Remove the directory.")
    corpora: list[str | Path] = [arguments.old if run.replay == 1 else arguments.new]
    if 0 < run.replay < 1:
        corpora += [arguments.old, "--weights", f"{1 - run.replay},{run.replay}"]
    fit = ["nestmodel", "fit", *corpora, "--noise", arguments.noise, "--config", arguments.config]
    fit += ["--init-from", arguments.start[run.seed], "--seed", str(run.seed)]
    fit += ["--lr", str(run.lr), "--warmup-steps", str(arguments.warmup_steps)]
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
    tables = []
    for language, *_ in arguments.language:
        errors = {
            (run.variant, str(run.seed)): read_errors(arguments.output / f"probe-{number}-{language}")
            for run, number in numbers.items()
        }
        tables.append(f"## {language}\n\n{variant_table(errors)}")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jiwer"))
    heads = [f"nestmodel/evaluate/probe/{name}.py" for name in ("ctc_head", "training")]
    measured = measured_line("benchmarks/bench_continued.py", "nestmodel/nn", *heads)
    return f"""# Continued pretraining

{measured}

Made by `benchmarks/bench_continued.py`{" --quick" if arguments.quick else ""} on {os.cpu_count()} CPU cores \
({platform.machine()}) with other work, {packages}.
{arguments.steps} steps with the preset `{arguments.config}`, a warm-up of {arguments.warmup_steps} steps, \
further flags: {arguments.fit_options or "none"}; heads with `{arguments.probe_options}`. Rates in %, differences in
percentage points, with 95 % bootstrap intervals over groups of `{arguments.group_by}`. {PURPOSES[arguments.purpose]}
Runs had numbers in a drawn order until all were scored. Replay 1 is the control: the same steps on old audio alone.

{chr(10).join(tables)}"""


if __name__ == "__main__":
    sys.exit(main())
