"""Scores the speech content of frozen encoders, in a drawn order and under hidden names.

    python benchmarks/bench_content.py OUTPUT --purpose figures --group-by scene --data Czech=train.json,test.json \
        --data Dutch=train.json,test.json --model "5 minutes/0=a.ckpt" --model "30 minutes/0=b.ckpt"

A `--data` is a language: NeMo lines with `text`, of which heads learn, and others, which are scored. Names such as
`a/0` and `a/1` are one variant with two seeds, whose errors are added up. The untrained encoder of an architecture is
scored once, and so are log-mels.

Models have letters, and jobs a drawn order, until the figures are written to figures.md, whose SHA-256 is printed. An
interrupted run goes on where it ended. `--quick` checks that everything runs.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench_learning import environment
from blind import add_models, check_models, digests_of, draw_once, first_alike, hide_names, named_models
from kept_settings import keep_settings
from measured import measured_line
from peer import run_peer
from transcribed import PURPOSES, add_languages, read_errors, read_manifest, variant_table, write_lines

from nestmodel import error_rate
from nestmodel.evaluate.error_rates import percent

QUICK_HEADS = "--max-epochs 2 --learning-rates 0.01 --probe-seeds 0"
QUICK_UTTERANCES = {"train": 60, "test": 20}
BASELINES = {"untrained": "untrained", "log-mels": "log_mel"}


class Job(NamedTuple):
    """One probe of one model."""

    language: str
    letter: str

    @property
    def slug(self) -> str:
        """Name of the directory of the probe."""
        return "-".join(self)


def main() -> int:
    """Scores all models under hidden names, and writes the results."""
    arguments = _arguments()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    models = named_models(arguments.model)
    kept = {name: str(getattr(arguments, name)) for name in ("group_by", "probe_options", "purpose", "quick")}
    keep_settings(output, {**kept, "data": json.dumps(arguments.data), "models": digests_of(models)})
    for language, *paths in arguments.data:
        for side, path in zip(QUICK_UTTERANCES, paths, strict=True):
            lines = read_manifest(Path(path), QUICK_UTTERANCES[side] if arguments.quick else 0)
            write_lines(output / f"{language}-{side}.json", lines)
    letters = hide_names(output, models)
    with_baselines = first_alike({letter: models[name] for letter, name in letters.items()})
    jobs = {job.slug: job for job in (Job(language, one) for language, *_ in arguments.data for one in letters)}
    order = draw_once(output / "order.json", list(jobs))

    def score(slug: str) -> None:
        _score(output, jobs[slug], arguments, has_baselines=jobs[slug].letter in with_baselines.values())

    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(score, order))
    figures = _tables(output, arguments, {(letter, "0"): letter for letter in sorted(letters)}, with_baselines)
    (output / "figures.md").write_text(figures, encoding="utf-8")
    digest = hashlib.sha256(figures.encode()).hexdigest()
    print(f"{output / 'figures.md'}: {digest}; now the letters are resolved")
    by_name = {name: letter for letter, name in letters.items()}
    variants = {_variant_and_seed(name): by_name[name] for name in models}  # in the order of the command
    tables = _tables(output, arguments, variants, with_baselines)
    arguments.results.write_text(_report(arguments, output, tables, digest), encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    add_languages(parser, "--data", required=True)
    parser.add_argument("--purpose", choices=PURPOSES, required=True, help="what the test lines are used for")
    parser.add_argument("--group-by", required=True, help="field of the lines whose values stay on one side")
    add_models(parser)
    parser.add_argument("--probe-options", default="", help="further flags of `nestmodel probe --task ctc`")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="models that are scored at the same time")
    parser.add_argument("--results", type=Path, default=Path("content.md"))
    parser.add_argument("--quick", action="store_true", help="few utterances and steps, to check the script")
    arguments = parser.parse_args()
    check_models(parser, arguments.model)
    return arguments


def _variant_and_seed(name: str) -> tuple[str, str]:
    variant, _, seed = name.rpartition("/")
    return (variant, seed) if variant else (name, "0")


def _score(output: Path, job: Job, arguments: argparse.Namespace, *, has_baselines: bool) -> None:
    if (output / job.slug / "probe.json").exists():
        return
    manifests = f"{job.language}-train.json --test {job.language}-test.json --group-by {arguments.group_by}"
    heads = f"{'' if has_baselines else '--baselines none'} {QUICK_HEADS if arguments.quick else ''}"
    command = (
        f"nestmodel probe {job.letter}.ckpt {manifests} --task ctc {heads} {arguments.probe_options} "
        f"--overwrite -o {job.slug}"
    )
    print("$", command, flush=True)
    run_peer(shlex.split(command), cwd=output, env=environment())


def _tables(
    output: Path,
    arguments: argparse.Namespace,
    variants: dict[tuple[str, str], str],
    with_baselines: dict[str, str],
) -> str:
    """Returns the tables of all languages. `variants` are letters by the name of a variant and its seed."""
    parts = []
    for language, *_ in arguments.data:
        folder = {letter: output / Job(language, letter).slug for letter in with_baselines}
        errors = {key: read_errors(folder[letter]) for key, letter in variants.items()}
        untrained = {key: read_errors(folder[with_baselines[letter]], "untrained") for key, letter in variants.items()}
        firsts = dict.fromkeys(with_baselines.values())
        rates = "; ".join(
            f"{name} {percent(error_rate(read_errors(folder[letter], features)))}"
            for letter in firsts
            for name, features in BASELINES.items()
        )
        probe = _read(folder[next(iter(firsts))])
        parts += [
            f"## {language}\n",
            f"Heads learned from {probe['num_training']} lines ({probe['num_held_out']} held out) and were scored on "
            f"{probe['num_test']} others. Errors in characters: {rates}.\n",
            variant_table(errors, untrained),
        ]
    return "\n".join(parts)


def _read(probe: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((probe / "probe.json").read_text(encoding="utf-8"))
    return found


def _report(arguments: argparse.Namespace, output: Path, tables: str, digest: str) -> str:
    """Returns the results as Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jiwer"))
    config = _read(output / Job(arguments.data[0][0], "A").slug)["config"]
    head = "linear heads" if config["hidden"] is None else f"heads with a hidden layer of {config['hidden']}"
    parts = [f"nestmodel/evaluate/{name}.py" for name in ("ctc_head", "ctc_probe")]
    measured = measured_line("benchmarks/bench_content.py", *parts, "nestmodel/nn")
    return f"""# Content of encoders

{measured}

Made by `benchmarks/bench_content.py`{" --quick" if arguments.quick else ""} on {os.cpu_count()} CPU cores \
({platform.machine()}), {packages}. Error
rates in characters in %, differences in percentage points, with 95 % bootstrap intervals over groups of
`{arguments.group_by}`. The encoders are frozen; {head} learned with seeds {config["probe_seeds"]}, learning rates
{config["learning_rates"]}, {config["max_epochs"]} epochs. {PURPOSES[arguments.purpose]}

Models had letters instead of names until the figures were written (SHA-256 of figures.md: `{digest}`).

{tables}"""


if __name__ == "__main__":
    sys.exit(main())
