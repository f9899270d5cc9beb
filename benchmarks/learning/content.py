"""Scores the speech content of frozen encoders, in a drawn order and under hidden names.

    python -m benchmarks run content OUTPUT --purpose figures --group-by scene --data Czech=train.json,test.json \
        --data Dutch=train.json,test.json --model "5 minutes/0=a.ckpt" --model "30 minutes/0=b.ckpt"

A `--data` is a language: NeMo lines with `text`, of which heads learn, and others, which are scored. Names such as
`a/0` and `a/1` are one variant with two seeds, whose errors are added up. The untrained encoder and log-mels are scored
once for each architecture and context. With `--each-context`, encoders with several attention contexts are scored in
each. `--loss-on` adds the pretraining loss on a corpus, of which encoders have heard nothing, mixed with noise.

Models have letters, and jobs a drawn order, until the figures are written to figures.md, whose SHA-256 is printed. An
interrupted run goes on where it ended. `--quick` checks that everything runs.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.harness.kept_settings import keep_settings
from benchmarks.harness.report import machine, table_text, versions
from benchmarks.harness.repository import commit_line
from benchmarks.learning.parts import blind
from benchmarks.learning.parts.held_out import held_out_batches, held_out_metrics
from benchmarks.learning.parts.manifests import PURPOSES, add_languages, write_languages
from benchmarks.learning.parts.probes import probes_parser, read_errors, read_probe, run_probe, variant_table
from nestdata import Corpus
from nestmodel import error_rate, load_network, read_config
from nestmodel.attention_context import format_context, parse_context
from nestmodel.evaluate.error_rates import percent

QUICK = None
QUICK_HEADS = "--max-epochs 2 --learning-rates 0.01 --probe-seeds 0"
KEPT = ("group_by", "probe_options", "purpose", "each_context", "loss_on", "quick")


class Model(NamedTuple):
    """An encoder in one of its attention contexts."""

    letter: str

    context: str
    """Such as `70,13`; empty for the first context of an encoder."""

    def shown(self, name: str) -> str:
        """Returns the name of an encoder with its context."""
        return f"{name}, {self.context}" if self.context else name

    def folder(self, language: str) -> str:
        """Returns the folder of its probe on a language."""
        return "-".join([language, *filter(None, self)])


Variants = Mapping[tuple[str, str], Model]
"""Models by the name of a variant and its seed."""


def main() -> int:
    """Scores all models under hidden names, and writes the results."""
    arguments = _arguments()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    kept = {name: str(getattr(arguments, name)) for name in KEPT}
    keep_settings(output, {**kept, "data": json.dumps(arguments.data), "models": blind.digests_of(arguments.models)})
    write_languages(output, arguments.data, is_quick=arguments.quick)
    letters = blind.hide_names(output, arguments.models)
    by_letter = {letter: arguments.models[name] for name, letter in letters.items()}
    scored = {
        letter: [Model(letter, context) for context in (contexts(path) if arguments.each_context else [""])]
        for letter, path in by_letter.items()
    }
    all_scored = [model for models in scored.values() for model in models]
    alike = blind.first_alike(dict(sorted(by_letter.items())))
    jobs = {
        model.folder(language): partial(_score, output, arguments, language, model, model.letter in alike.values())
        for language, *_ in arguments.data
        for model in all_scored
    }
    blind.run_drawn(output, jobs, arguments.at_once)
    if arguments.loss_on:
        _measure_losses(output, arguments.loss_on, all_scored)
    seeds = {letter: blind.variant_and_seed(name) for name, letter in letters.items()}
    blind.publish(
        output,
        arguments.results,
        partial(_tables, output, arguments, alike),
        hidden={(model.shown(model.letter), "0"): model for model in sorted(all_scored)},
        named={
            (model.shown(variant), seed): model
            for letter, (variant, seed) in seeds.items()  # in the order of the command
            for model in scored[letter]
        },
        head=partial(_head, arguments, output),
    )
    return 0


def _arguments() -> argparse.Namespace:
    parser = probes_parser(__doc__, results="content.md")
    add_languages(parser, "--data", required=True)
    parser.add_argument("--group-by", required=True, help="field of the lines whose values stay on one side")
    blind.add_models(parser)
    parser.add_argument("--each-context", action="store_true", help="score each attention context of an encoder")
    parser.add_argument("--loss-on", type=Path, nargs=2, metavar=("SPEECH", "NOISE"), help="prepared corpora")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="models that are scored at the same time")
    arguments = parser.parse_args()
    arguments.models = blind.named_models(parser, arguments.model)
    return arguments


def contexts(checkpoint: Path) -> list[str]:
    """Returns the attention contexts of an encoder as `--context` has them; an empty one if it has one only."""
    found = read_config(checkpoint).encoder.att_context_size
    return [format_context(one) for one in found] if len(found) > 1 else [""]


def _score(output: Path, arguments: argparse.Namespace, language: str, model: Model, has_baselines: bool) -> None:
    baselines = "" if has_baselines else "--baselines"
    context = f"--context={model.context}" if model.context else ""
    task = (
        f"{model.letter}.ckpt {language}-train.json --test {language}-test.json --group-by {arguments.group_by} "
        f"{context} {baselines} {QUICK_HEADS if arguments.quick else ''} {arguments.probe_options}"
    )
    run_probe(output, model.folder(language), task)


def _measure_losses(output: Path, corpora: Sequence[Path], models: Iterable[Model]) -> None:
    """Writes the metrics of all models on held-out speech to `losses.json`, unless an earlier call did."""
    if (output / "losses.json").exists():
        return
    speech, noise = map(Corpus.open, corpora)
    batches = held_out_batches(speech, noise)
    found = {}
    for model in models:
        context = parse_context(model.context) if model.context else None
        network = load_network(output / f"{model.letter}.ckpt", context).eval()
        found[model.shown(model.letter)] = held_out_metrics(network, batches)
    (output / "losses.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _loss_table(output: Path, variants: Variants) -> str:
    """Returns the losses by variant, each the mean of its seeds, and those of the seeds."""
    found = json.loads((output / "losses.json").read_text(encoding="utf-8"))
    entropies = sorted({round(one["token_entropy"], 3) for one in found.values()})
    by_variant: dict[str, dict[str, float]] = {}
    for (variant, seed), model in variants.items():
        by_variant.setdefault(variant, {})[seed] = found[model.shown(model.letter)]["loss"]
    rows = (
        [variant, f"{mean(losses.values()):.3f}", ", ".join(f"{seed}: {loss:.3f}" for seed, loss in losses.items())]
        for variant, losses in by_variant.items()
    )
    table = table_text(["variant", "loss, nats", "by seed"], rows)
    return f"## Loss\n\nEntropy of the tokens: {', '.join(map(str, entropies))}.\n\n{table}\n"


def _tables(output: Path, arguments: argparse.Namespace, alike: Mapping[str, str], variants: Variants) -> str:
    """Returns the tables of all languages. `alike` has the letter whose probes have the baselines of a letter."""
    parts = [_loss_table(output, variants)] if arguments.loss_on else []
    for language, *_ in arguments.data:
        folders = {key: output / model.folder(language) for key, model in variants.items()}
        first = {key: output / Model(alike[m.letter], m.context).folder(language) for key, m in variants.items()}
        errors = {key: read_errors(path) for key, path in folders.items()}
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


def _head(arguments: argparse.Namespace, output: Path, digest: str) -> str:
    """Returns what stands before the tables of the results."""
    config = read_probe(next(output.glob(f"{arguments.data[0][0]}-A*")))["config"]
    script = "benchmarks/learning/content.py"
    return f"""# Content of encoders

{commit_line()}

Made by `{script}`{" --quick" if arguments.quick else ""} on {machine("CPU cores")}, {versions("torch", "jiwer")}. Error
rates in characters in %, differences in percentage points, with 95 % bootstrap intervals over groups of
`{arguments.group_by}`. The encoders are frozen; linear heads learned with seeds {config["probe_seeds"]}, learning rates
{config["learning_rates"]}, {config["max_epochs"]} epochs. {PURPOSES[arguments.purpose]}

Models had letters instead of names until the figures were written (SHA-256 of figures.md: `{digest}`).

"""


if __name__ == "__main__":
    sys.exit(main())
