"""Scores encoders with the content probe, in a drawn order and under hidden names.

    python benchmarks/bench_content.py OUTPUT --train train.json --test test.json --model NAME=CHECKPOINT ...
    python benchmarks/bench_content.py OUTPUT --train train.json --test test.json --group-by scene \
        --speech speech.json --noise noise.json --minutes 30 --pretraining-seeds 0,1 \
        --variant "preset=" --variant "one codebook=--model.config.quantizer.num_codebooks 1"

The first form scores given models. The second form pretrains the demo preset first, on SPEECH and on the training audio
without its texts, once for each number of minutes, variant of the settings and seed. Models get letters in a drawn
order, and are pretrained and scored in drawn orders. The commands and their output name letters only. The figures of
all letters are written to figures.md, whose SHA-256 is printed, before the letters are resolved to names in the
results. Models with names such as `a/0`, `a/1` and `b/0`, `b/1` are two variants with two seeds each: the results
compare the variants, too. A run that was interrupted goes on where it ended. `--quick` checks that everything runs,
with a few utterances and steps.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from operator import add
from pathlib import Path
from typing import Any

from bench_learning import SETTINGS, environment
from blind import draw_once
from kept_settings import keep_settings
from peer import run_peer

from nestmodel import Estimate
from nestmodel.evaluate.error_rates import ErrorCounts, count_errors, error_difference, error_rate, percent

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
QUICK_PROBE = "--max-epochs 2 --learning-rates 0.01 --probe-seeds 0"
QUICK_FRAMES = "--max-epochs 1 --num-units 10"
QUICK_UTTERANCES = {"train": 60, "test": 20}


def main() -> int:
    """Pretrains if asked to, scores all models under hidden names, and writes the results."""
    arguments = _arguments()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    kept = ("train", "test", "group_by", "speech", "noise", "variant", "overrides", "probe_options", "quick")
    keep_settings(output, {name: str(getattr(arguments, name)) for name in kept})
    for side in ("train", "test"):
        write_manifest(getattr(arguments, side), output / f"{side}.json", arguments.quick and QUICK_UTTERANCES[side])
    given = dict(one.split("=", 1) for one in arguments.model)
    runs = {} if given else _runs(arguments)
    names = [*given, *runs]
    letters = _draw_letters(output, names)
    if runs:
        _prepare(arguments, output)
    for letter in _order(output, "pretraining", letters):
        name = letters[letter]
        if (output / f"{letter}.ckpt").exists():
            continue
        checkpoint = Path(given[name]) if given else _pretrain(output, letter, runs[name], arguments)
        shutil.copy(checkpoint, output / f"{letter}.ckpt")
    for letter in _order(output, "scoring", letters):
        _score(output, letter, arguments)
    found = {letter: _read(output, letter) for letter in sorted(letters)}
    figures = _figures(found)
    (output / "figures.md").write_text(figures)
    digest = hashlib.sha256(figures.encode()).hexdigest()
    print(f"{output / 'figures.md'}: {digest}; now the letters are resolved")
    revealed = {letters[letter]: probe for letter, probe in found.items()}
    arguments.results.write_text(_report(arguments, output, {name: revealed[name] for name in names}, letters, digest))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--train", type=Path, required=True, help="NeMo lines with text, of which the probe learns")
    parser.add_argument("--test", type=Path, required=True, help="NeMo lines with text, which are scored")
    parser.add_argument("--group-by", help="field of the lines whose values stay on one side of the held-out split")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=CHECKPOINT", help="may be repeated")
    parser.add_argument("--speech", type=Path, help="NeMo lines of speech for pretraining")
    parser.add_argument("--noise", type=Path, help="NeMo lines of noise for pretraining")
    parser.add_argument("--minutes", default="30", help="lengths of pretraining, such as 5,15,30")
    parser.add_argument("--pretraining-seeds", default="0", help="seeds of pretraining, such as 0,1")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME=FLAGS", help="settings to compare; may be repeated"
    )
    parser.add_argument("--overrides", default="", help="further flags of `nestmodel fit`, for all variants")
    parser.add_argument("--probe-options", default="", help="further flags of `nestmodel probe`")
    parser.add_argument("--results", type=Path, default=Path("content.md"))
    parser.add_argument("--quick", action="store_true", help="few utterances and steps, to check the script")
    arguments = parser.parse_args()
    if not arguments.model and not (arguments.speech and arguments.noise):
        parser.error("give --model, or --speech and --noise")
    return arguments


@dataclass(frozen=True)
class _Pretraining:
    """One run of pretraining: its length, its seed, and flags of `nestmodel fit`."""

    minutes: int
    seed: int
    flags: str


def _runs(arguments: argparse.Namespace) -> dict[str, _Pretraining]:
    """Returns the runs of pretraining by name: variant and length, a slash, and the seed."""
    variants = dict(one.split("=", 1) for one in arguments.variant or ["preset="])
    return {
        f"{name}, {minutes} minutes/{seed}": _Pretraining(int(minutes), int(seed), flags)
        for minutes in arguments.minutes.split(",")
        for name, flags in variants.items()
        for seed in arguments.pretraining_seeds.split(",")
    }


def write_manifest(source: Path, target: Path, limit: int = 0) -> None:
    """Copies a manifest with absolute paths; `limit` utterances if it is not 0, evenly spread."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["audio_filepath"] = str((source.parent / row["audio_filepath"]).absolute())
    if limit:
        rows = rows[:: max(1, len(rows) // limit)][:limit]
    target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _draw_letters(output: Path, names: list[str]) -> dict[str, str]:
    """Returns the names by letter, from names.json if there was an earlier run of the same models."""
    path = output / "names.json"
    letters = dict(zip(LETTERS, draw_once(path, names), strict=False))
    if sorted(letters.values()) != sorted(names):
        raise SystemExit(f"{path}: belongs to other models. Give another output folder.")
    return letters


def _order(output: Path, purpose: str, letters: dict[str, str]) -> list[str]:
    """Returns the letters in an order of their own for each purpose, the same in a run that goes on."""
    salt = (output / "names.json").read_text() + purpose
    return sorted(letters, key=lambda letter: hashlib.sha256(f"{salt}{letter}".encode()).digest())


def _prepare(arguments: argparse.Namespace, output: Path) -> None:
    """Prepares the corpora of the pretraining; the training audio of the probe is part of it, without its texts."""
    if (output / "pretrain.corpus").exists():
        return
    rows = [json.loads(line) for line in (output / "train.json").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        del row["text"]
    (output / "audio_only.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("speech", "noise"):
        write_manifest(getattr(arguments, name), output / f"{name}.json", arguments.quick and QUICK_UTTERANCES["train"])
    for command in (
        "nestdata prepare noise.json -o noise.corpus --pcm --overwrite",
        "nestdata prepare speech.json audio_only.json -o pretrain.corpus --max-seconds 30",
    ):
        _run(command, output)


def _pretrain(output: Path, letter: str, run: _Pretraining, arguments: argparse.Namespace) -> Path:
    """Returns the last checkpoint of a new run."""
    shutil.rmtree(output / f"run-{letter}", ignore_errors=True)
    settings = {name: value for name, value in SETTINGS.items() if "val_check" not in name}
    if arguments.quick:
        settings["trainer.max_steps"] = 4
    overrides = " ".join(f"--{name} {value}" for name, value in settings.items())
    _run(
        "nestmodel fit --config demo --data.corpus pretrain.corpus --data.noise noise.corpus "
        f"--trainer.default_root_dir run-{letter} "
        f"--trainer.max_time 00:{run.minutes // 60:02d}:{run.minutes % 60:02d}:00 "
        f"{overrides} --seed_everything {run.seed} {arguments.overrides} {run.flags}",
        output,
        is_hidden=True,
    )
    return output / f"run-{letter}" / "version_0" / "checkpoints" / "last.ckpt"


def _score(output: Path, letter: str, arguments: argparse.Namespace) -> None:
    group_by = f"--group-by {arguments.group_by}" if arguments.group_by else ""
    commands = {
        f"ctc-{letter}": f"--task ctc {group_by} {QUICK_PROBE if arguments.quick else ''} {arguments.probe_options}",
        f"frames-{letter}": f"--task frames --units characters {group_by} {QUICK_FRAMES if arguments.quick else ''}",
    }
    for name, task in commands.items():
        if not (output / name / "probe.json").exists():
            began = time.monotonic()
            _run(f"nestmodel probe {letter}.ckpt train.json --test test.json {task} -o {name}", output)
            (output / name / "seconds").write_text(f"{time.monotonic() - began:.0f}")


def _run(command: str, output: Path, is_hidden: bool = False) -> None:
    print("$", command.split(" --trainer.default_root_dir")[0] + " ..." if is_hidden else command, flush=True)
    run_peer(shlex.split(command), cwd=output, env=environment(), echo=not is_hidden)


def _read(output: Path, letter: str) -> dict[str, Any]:
    found = {
        task: json.loads((output / f"{task}-{letter}" / "probe.json").read_text(encoding="utf-8"))
        for task in ("ctc", "frames")
    }
    lines = (output / f"ctc-{letter}" / "hypotheses.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = (output / f"ctc-{letter}" / "seconds").read_text()
    return {**found, "transcripts": [json.loads(line) for line in lines], "seconds": seconds}


def _figures(found: dict[str, dict[str, Any]]) -> str:
    """Returns tables of all figures, one row for each letter or name."""
    names = {"trained": "trained", "untrained": "untrained", "log_mel": "log-mel"}
    lines = ["| model | features | CER | WER | CER by seed | learning rate | epochs |", "|---|---|---|---|---|---|---|"]
    for model, probe in found.items():
        for one in probe["ctc"]["contestants"]:
            seeds = ", ".join(f"{100 * seed['characters']['rate']:.1f}" for seed in one["seeds"])
            epochs = ", ".join(str(seed["num_epochs"]) for seed in one["seeds"])
            rates = f"{_shown(one['characters'], 'rate')} | {_shown(one['words'], 'rate')}"
            lines.append(f"| {model} | {names[one['name']]} | {rates} | {seeds} | {one['learning_rate']} | {epochs} |")
    lines += ["", "| model | CER, trained minus | all seeds | by seed |", "|---|---|---|---|"]
    for model, probe in found.items():
        for one in probe["ctc"]["differences"]:
            seeds = "; ".join(_shown(seed) for seed in one["characters_by_seed"])
            lines.append(f"| {model} | {names[one['baseline']]} | {_shown(one['characters'])} | {seeds} |")
    lines += ["", "| model | features | layer | accuracy of frames | PNMI | purity |", "|---|---|---|---|---|---|"]
    for model, probe in found.items():
        for one in probe["frames"]["layers"]:
            clusters = f"{one['clusters']['normalised_information']:.3f} | {one['clusters']['purity']:.3f}"
            cells = f"{names[one['contestant']]} | {one['layer']} | {_shown(one['accuracy'])} | {clusters}"
            lines.append(f"| {model} | {cells} |")
    return "\n".join(lines) + "\n"


def _variant_table(found: dict[str, dict[str, Any]]) -> str:
    """Returns a table of the variants, models whose names differ after the slash only; "" if there are none."""
    counts: dict[str, dict[str, ErrorCounts]] = defaultdict(dict)
    for name, model in found.items():
        variant, slash, seed = name.rpartition("/")
        if slash:
            counts[variant][seed] = _count_errors(model["transcripts"])
    if len(counts) < 2:
        return ""
    first, *others = counts
    lines = [
        "Variants, their errors added up over seeds of pretraining and of heads:",
        "",
        f"| variant | CER | CER by seed of pretraining | minus {first} |",
        "|---|---|---|---|",
    ]
    totals = {variant: reduce(add, by_seed.values()) for variant, by_seed in counts.items()}
    for variant, by_seed in counts.items():
        seeds = ", ".join(f"{seed}: {100 * error_rate(one).rate:.1f}" for seed, one in by_seed.items())
        difference = percent(error_difference(totals[variant], totals[first])) if variant in others else ""
        lines.append(f"| {variant} | {percent(error_rate(totals[variant]))} | {seeds} | {difference} |")
    return "\n".join(lines) + "\n\n"


def _count_errors(transcripts: list[dict[str, Any]]) -> ErrorCounts:
    """Returns the errors in characters of the trained encoder by test utterance, added up over the seeds of heads."""
    references = [one["text"] for one in transcripts]
    seeds = list(transcripts[0]["trained"])
    return reduce(
        add, (count_errors(references, [one["trained"][seed] for one in transcripts], "characters") for seed in seeds)
    )


def _is_below(differences: list[dict[str, Any]]) -> bool:
    """Returns whether the intervals of all differences lie below 0, those of all seeds together and those of each."""
    return all(
        estimate["high"] < 0 for one in differences for estimate in (one["characters"], *one["characters_by_seed"])
    )


def _shown(estimate: dict[str, float], name: str = "value") -> str:
    return percent(Estimate(estimate[name], estimate["low"], estimate["high"]))


def _report(
    arguments: argparse.Namespace, output: Path, found: dict[str, dict[str, Any]], letters: dict[str, str], digest: str
) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jiwer", "scikit-learn"))
    probe = next(iter(found.values()))["ctc"]
    config = probe["config"]
    orders = {purpose: _order(output, purpose, letters) for purpose in ("pretraining", "scoring")}
    drawn = "; ".join(f"{purpose}: {', '.join(letters[one] for one in order)}" for purpose, order in orders.items())
    seconds = ", ".join(f"{name}: {one['seconds']} s" for name, one in found.items())
    below = [name for name, one in found.items() if _is_below(one["ctc"]["differences"])]
    return f"""# Content probe

Made by `benchmarks/bench_content.py`{" --quick" if arguments.quick else ""} on {os.cpu_count()} CPU cores \
({platform.machine()}), {packages}. Error rates and accuracies in %, differences in percentage points, with 95 %
bootstrap intervals over utterances. {probe["num_training"]} utterances for training, {probe["num_held_out"]} held
out, {probe["num_test"]} test utterances. Heads: seeds {config["probe_seeds"]}, learning rates
{config["learning_rates"]}, at most {config["max_epochs"]} epochs, patience {config["patience"]},
{config["labels_per_frame"]} labels per frame.

Models had letters instead of names until the figures were written (SHA-256 of figures.md: `{digest}`). Drawn orders:
{drawn}. Time of the content probe, features included: {seconds}.

Trained below both baselines by more than the interval of the difference, with all seeds together and with each one:
{", ".join(below) or "none"}.

{_variant_table(found)}{_figures(found)}
The units of the frames are the characters of a forced alignment. Alphabet: `{probe["alphabet"]}`.
Test characters outside it: {sum(probe["unknown_characters"].values())}.
"""


if __name__ == "__main__":
    sys.exit(main())
