"""Scores the speech content of frozen encoders, in a drawn order and under hidden names.

    python benchmarks/bench_content.py OUTPUT --purpose figures --group-by scene --data Czech=train.json,test.json \
        --data Dutch=train.json,test.json --model "5 minutes/0=a.ckpt" --model "30 minutes/0=b.ckpt"

A `--data` is a language: NeMo lines with `text`, of which heads learn, and others, which are scored. Names such as
`a/0` and `a/1` are one variant with two seeds, whose errors are added up. The untrained encoder and log-mels are scored
once for each architecture and context. With `--each-context`, encoders with several attention contexts are scored in
each. `--loss-on` adds the pretraining loss on a corpus, of which encoders have heard nothing, mixed with noise.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from bench_learning import environment
from blind import add_models, check_models, digests_of, draw_once, first_alike, hide_names, named_models
from held_out import held_out_batches, held_out_metrics
from kept_settings import keep_settings
from measured import measured_line
from peer import run_peer
from transcribed import PURPOSES, add_languages, read_errors, read_manifest, read_probe, variant_table, write_lines

from nestdata import Corpus
from nestmodel import error_rate, load_network, read_config
from nestmodel.attention_context import format_context, parse_context
from nestmodel.evaluate.error_rates import percent

QUICK_HEADS = "--max-epochs 2 --learning-rates 0.01 --probe-seeds 0"
QUICK_UTTERANCES = {"train": 60, "test": 20}


class Model(NamedTuple):
    """An encoder in one of its attention contexts."""

    letter: str

    context: str
    """Such as `70,13`; empty for the first context of an encoder."""


class Job(NamedTuple):
    """One probe of one model."""

    language: str
    model: Model

    @property
    def slug(self) -> str:
        """Name of the directory of the probe."""
        return "-".join([self.language, *filter(None, self.model)])


def main() -> int:
    """Scores all models under hidden names, and writes the results."""
    arguments = _arguments()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    models = named_models(arguments.model)
    kept = {
        name: str(getattr(arguments, name))
        for name in ("group_by", "probe_options", "purpose", "each_context", "loss_on", "quick")
    }
    keep_settings(output, {**kept, "data": json.dumps(arguments.data), "models": digests_of(models)})
    for language, *paths in arguments.data:
        for side, path in zip(QUICK_UTTERANCES, paths, strict=True):
            lines = read_manifest(Path(path), QUICK_UTTERANCES[side] if arguments.quick else 0)
            write_lines(output / f"{language}-{side}.json", lines)
    letters = hide_names(output, models)
    by_letter = {letter: models[name] for letter, name in letters.items()}
    scored = {letter: contexts(path) if arguments.each_context else [""] for letter, path in by_letter.items()}
    alike = first_alike(by_letter)
    scored_models = [Model(letter, context) for letter, found in scored.items() for context in found]
    jobs = {job.slug: job for job in (Job(language, one) for language, *_ in arguments.data for one in scored_models)}
    order = draw_once(output / "order.json", list(jobs))

    def score(slug: str) -> None:
        _score(output, jobs[slug], arguments, has_baselines=jobs[slug].model.letter in alike.values())

    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(score, order))
    if arguments.loss_on:
        _measure_losses(output, arguments.loss_on, scored_models)
    figures = _tables(output, arguments, {(_shown(one.letter, one), "0"): one for one in sorted(scored_models)}, alike)
    (output / "figures.md").write_text(figures, encoding="utf-8")
    digest = hashlib.sha256(figures.encode()).hexdigest()
    print(f"{output / 'figures.md'}: {digest}; now the letters are resolved")
    by_name = {name: letter for letter, name in letters.items()}
    variants = {
        (_shown(variant, model), seed): model
        for name in models  # in the order of the command
        for variant, seed in [_variant_and_seed(name)]
        for model in scored_models
        if model.letter == by_name[name]
    }
    tables = _tables(output, arguments, variants, alike)
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
    parser.add_argument("--each-context", action="store_true", help="score each attention context of an encoder")
    parser.add_argument("--loss-on", type=Path, nargs=2, metavar=("SPEECH", "NOISE"), help="prepared corpora")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="models that are scored at the same time")
    parser.add_argument("--results", type=Path, default=Path("content.md"))
    parser.add_argument("--quick", action="store_true", help="few utterances and steps, to check the script")
    arguments = parser.parse_args()
    check_models(parser, arguments.model)
    if len(set(map(_variant_and_seed, named_models(arguments.model)))) < len(arguments.model):
        parser.error("two models have the same variant and seed: a name without /SEED has seed 0")
    return arguments


def contexts(checkpoint: Path) -> list[str]:
    """Returns the attention contexts of an encoder as `--context` has them; an empty one if it has one only."""
    found = read_config(checkpoint).encoder.att_context_size
    return [format_context(one) for one in found] if len(found) > 1 else [""]


def _shown(name: str, model: Model) -> str:
    return f"{name}, {model.context}" if model.context else name


def _variant_and_seed(name: str) -> tuple[str, str]:
    variant, _, seed = name.rpartition("/")
    return (variant, seed) if variant else (name, "0")


def _score(output: Path, job: Job, arguments: argparse.Namespace, *, has_baselines: bool) -> None:
    if (output / job.slug / "probe.json").exists():
        return
    manifests = f"{job.language}-train.json --test {job.language}-test.json --group-by {arguments.group_by}"
    heads = f"{'' if has_baselines else '--baselines none'} {QUICK_HEADS if arguments.quick else ''}"
    context = f"--context={job.model.context}" if job.model.context else ""
    command = (
        f"nestmodel probe {job.model.letter}.ckpt {manifests} --task ctc {context} {heads} {arguments.probe_options} "
        f"--overwrite -o {job.slug}"
    )
    print("$", command, flush=True)
    run_peer(shlex.split(command), cwd=output, env=environment())


def _measure_losses(output: Path, corpora: Sequence[Path], models: Sequence[Model]) -> None:
    """Writes the metrics of all models on held-out speech to `losses.json`, unless an earlier call did."""
    if (output / "losses.json").exists():
        return
    batches = held_out_batches(*map(Corpus.open, corpora))
    found = {}
    for model in models:
        context = parse_context(model.context) if model.context else None
        network = load_network(output / f"{model.letter}.ckpt", context).eval()
        found[_shown(model.letter, model)] = held_out_metrics(network, batches)
    (output / "losses.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _loss_table(output: Path, variants: dict[tuple[str, str], Model]) -> str:
    """Returns the losses by variant, each the mean of its seeds, and those of the seeds."""
    found = json.loads((output / "losses.json").read_text(encoding="utf-8"))
    entropies = {round(one["token_entropy"], 3) for one in found.values()}
    by_variant: dict[str, dict[str, float]] = {}
    for (variant, seed), model in variants.items():
        by_variant.setdefault(variant, {})[seed] = found[_shown(model.letter, model)]["loss"]
    lines = ["| variant | loss, nats | by seed |", "|---|---|---|"]
    for variant, losses in by_variant.items():
        by_seed = ", ".join(f"{seed}: {loss:.3f}" for seed, loss in losses.items())
        lines.append(f"| {variant} | {mean(losses.values()):.3f} | {by_seed} |")
    entropy = ", ".join(map(str, sorted(entropies)))
    return "\n".join(["## Loss", "", f"Entropy of the tokens: {entropy}.", "", *lines, ""])


def _tables(
    output: Path,
    arguments: argparse.Namespace,
    variants: dict[tuple[str, str], Model],
    alike: dict[str, str],
) -> str:
    """Returns the tables of all languages. `variants` are models by the name of a variant and its seed."""
    parts = [_loss_table(output, variants)] if arguments.loss_on else []
    for language, *_ in arguments.data:
        folder = {model: output / Job(language, model).slug for model in variants.values()}
        first = {key: folder[Model(alike[letter], context)] for key, (letter, context) in variants.items()}
        errors = {key: read_errors(folder[model]) for key, model in variants.items()}
        untrained = {key: read_errors(path, "untrained") for key, path in first.items()}
        log_mels = dict.fromkeys(percent(error_rate(read_errors(path, "log_mel"))) for path in first.values())
        probe = read_probe(next(iter(first.values())))
        parts += [
            f"## {language}\n",
            f"Heads learned from {probe['num_training']} lines ({probe['num_held_out']} held out) and were scored on "
            f"{probe['num_test']} others. Log-mels: {'; '.join(log_mels)}.\n",
            variant_table(errors, untrained),
        ]
    return "\n".join(parts)


def _report(arguments: argparse.Namespace, output: Path, tables: str, digest: str) -> str:
    """Returns the results as Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jiwer"))
    config = read_probe(next(output.glob(f"{arguments.data[0][0]}-A*")))["config"]
    head = "linear heads" if config["hidden"] is None else f"heads with a hidden layer of {config['hidden']}"
    parts = [f"nestmodel/evaluate/probe/{name}.py" for name in ("ctc", "ctc_head", "training")]
    measured = measured_line("benchmarks/bench_content.py", "benchmarks/held_out.py", *parts, "nestmodel/nn")
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
