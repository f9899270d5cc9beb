"""Scores encoders with the content probe and the frame probe, in a drawn order and under hidden names.

    python benchmarks/bench_content.py OUTPUT --train train.json --test test.json --group-by scene \
        --model "5 minutes=a.ckpt" --model "30 minutes=b.ckpt"

Models get letters in a drawn order, and are scored in another one, as many at once as there are cores. The commands and
their output name letters only. The figures of all letters are written to figures.md, whose SHA-256 is printed, before
the letters are resolved to names in the results. Models with names such as `a/0`, `a/1`, `b/0` and `b/1` are two
variants with two seeds each: the results compare the variants, too. A run that was interrupted goes on where it ended.
`--quick` checks that everything runs, with a few utterances and steps.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_learning import environment
from blind import add_models, check_models, digests_of, draw_once, hide_names, named_models
from kept_settings import keep_settings
from measured import measured_line
from peer import run_peer
from transcribed import read_errors, read_manifest, variant_table, write_lines

from nestmodel import Estimate
from nestmodel.evaluate.contestants import contestant_name
from nestmodel.evaluate.error_rates import percent

QUICK_PROBE = "--max-epochs 2 --learning-rates 0.01 --probe-seeds 0"
QUICK_FRAMES = "--max-epochs 1 --num-units 10"
QUICK_UTTERANCES = {"train": 60, "test": 20}


def main() -> int:
    """Scores all models under hidden names, and writes the results."""
    arguments = _arguments()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    models = named_models(arguments.model)
    kept = {name: str(getattr(arguments, name)) for name in ("train", "test", "group_by", "probe_options", "quick")}
    keep_settings(output, {**kept, "models": digests_of(models)})
    for side in ("train", "test"):
        lines = read_manifest(getattr(arguments, side), QUICK_UTTERANCES[side] if arguments.quick else 0)
        write_lines(output / f"{side}.json", lines)
    letters = hide_names(output, models)
    order = draw_once(output / "order.json", list(letters))
    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(lambda letter: _score(output, letter, arguments), order))
    found = {letter: _read(output, letter) for letter in sorted(letters)}
    figures = _figures(found)
    (output / "figures.md").write_text(figures, encoding="utf-8")
    digest = hashlib.sha256(figures.encode()).hexdigest()
    print(f"{output / 'figures.md'}: {digest}; now the letters are resolved")
    by_name = {name: letter for letter, name in letters.items()}
    report = _report(arguments, output, {name: by_name[name] for name in models}, found, order, digest)
    arguments.results.write_text(report, encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--train", type=Path, required=True, help="NeMo lines with text, of which the probes learn")
    parser.add_argument("--test", type=Path, required=True, help="NeMo lines with text, which are scored")
    parser.add_argument("--group-by", help="field of the lines whose values stay on one side of the held-out split")
    add_models(parser)
    parser.add_argument("--probe-options", default="", help="further flags of `nestmodel probe --task ctc`")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="models that are scored at the same time")
    parser.add_argument("--results", type=Path, default=Path("content.md"))
    parser.add_argument("--quick", action="store_true", help="few utterances and steps, to check the script")
    arguments = parser.parse_args()
    check_models(parser, arguments.model)
    return arguments


def _score(output: Path, letter: str, arguments: argparse.Namespace) -> None:
    group_by = f"--group-by {arguments.group_by}" if arguments.group_by else ""
    commands = {
        f"ctc-{letter}": f"--task ctc {group_by} {QUICK_PROBE if arguments.quick else ''} {arguments.probe_options}",
        f"frames-{letter}": f"--task frames --units characters {group_by} {QUICK_FRAMES if arguments.quick else ''}",
    }
    for name, task in commands.items():
        if not (output / name / "probe.json").exists():
            began = time.monotonic()
            command = f"nestmodel probe {letter}.ckpt train.json --test test.json {task} -o {name}"
            print("$", command, flush=True)
            run_peer(shlex.split(command), cwd=output, env=environment())
            (output / name / "seconds").write_text(f"{time.monotonic() - began:.0f}")


def _read(output: Path, letter: str) -> dict[str, Any]:
    found = {
        task: json.loads((output / f"{task}-{letter}" / "probe.json").read_text(encoding="utf-8"))
        for task in ("ctc", "frames")
    }
    return {**found, "seconds": (output / f"ctc-{letter}" / "seconds").read_text()}


def _figures(found: dict[str, dict[str, Any]]) -> str:
    """Returns tables of all figures, one row for each letter or name."""
    lines = [
        "| model | features | CER | WER | CER by seed | learning rate | epochs | labels per frame |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, probe in found.items():
        labels = f"{probe['ctc']['config']['labels_per_frame']} of {1000 / probe['ctc']['frame_rate_hz']:.0f} ms"
        for one in probe["ctc"]["contestants"]:
            seeds = ", ".join(f"{100 * seed['characters']['rate']:.1f}" for seed in one["seeds"])
            epochs = ", ".join(str(seed["num_epochs"]) for seed in one["seeds"])
            rates = f"{_shown(one['characters'], 'rate')} | {_shown(one['words'], 'rate')}"
            cells = f"{rates} | {seeds} | {one['learning_rate']} | {epochs} | {labels}"
            lines.append(f"| {model} | {contestant_name(one['name'])} | {cells} |")
    lines += ["", "| model | CER, trained minus | all seeds | by seed |", "|---|---|---|---|"]
    for model, probe in found.items():
        for one in probe["ctc"]["differences"]:
            seeds = "; ".join(_shown(seed) for seed in one["characters_by_seed"])
            lines.append(f"| {model} | {contestant_name(one['baseline'])} | {_shown(one['characters'])} | {seeds} |")
    lines += ["", "| model | features | layer | accuracy of frames | PNMI | purity |", "|---|---|---|---|---|---|"]
    for model, probe in found.items():
        for one in probe["frames"]["layers"]:
            clusters = f"{one['clusters']['normalised_information']:.3f} | {one['clusters']['purity']:.3f}"
            cells = f"{contestant_name(one['contestant'])} | {one['layer']} | {_shown(one['accuracy'])} | {clusters}"
            lines.append(f"| {model} | {cells} |")
    return "\n".join(lines) + "\n"


def _is_below(differences: list[dict[str, Any]]) -> bool:
    """Returns whether the intervals of all differences lie below 0, those of all seeds together and those of each."""
    return all(
        estimate["high"] < 0 for one in differences for estimate in (one["characters"], *one["characters_by_seed"])
    )


def _shown(estimate: dict[str, float], name: str = "value") -> str:
    return percent(Estimate(estimate[name], estimate["low"], estimate["high"]))


def _report(
    arguments: argparse.Namespace,
    output: Path,
    letters: dict[str, str],
    found: dict[str, dict[str, Any]],
    order: list[str],
    digest: str,
) -> str:
    """Returns the results as Markdown, with the models by name."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jiwer", "scikit-learn"))
    revealed = {name: found[letter] for name, letter in letters.items()}
    probe = next(iter(revealed.values()))["ctc"]
    config = probe["config"]
    names = {letter: name for name, letter in letters.items()}
    seconds = ", ".join(f"{name}: {one['seconds']} s" for name, one in revealed.items())
    below = [name for name, one in revealed.items() if _is_below(one["ctc"]["differences"])]
    errors = {
        (name.rpartition("/")[0], name.rpartition("/")[2]): read_errors(output / f"ctc-{letter}")
        for name, letter in letters.items()
        if "/" in name
    }
    variants = variant_table(errors)
    evaluate = "nestmodel/evaluate"
    measured = measured_line(
        f"{evaluate}/ctc_head.py", f"{evaluate}/ctc_probe.py", f"{evaluate}/frame_probe.py", "nestmodel/nn"
    )
    return f"""# Content probe

{measured}

Made by `benchmarks/bench_content.py`{" --quick" if arguments.quick else ""} on {os.cpu_count()} CPU cores \
({platform.machine()}), {packages}. Error rates and accuracies in %, differences in percentage points, with 95 %
bootstrap intervals over {probe["intervals_over"]}. {probe["num_training"]} utterances for training, \
{probe["num_held_out"]} held out, {probe["num_test"]} test utterances. Heads: seeds {config["probe_seeds"]}, \
learning rates
{config["learning_rates"]}, at most {config["max_epochs"]} epochs, patience {config["patience"]}.

Models had letters instead of names until the figures were written (SHA-256 of figures.md: `{digest}`). Drawn order:
{", ".join(names[letter] for letter in order)}. Time of the content probe, features included: {seconds}.

Trained below both baselines by more than the interval of the difference, with all seeds together and with each one:
{", ".join(below) or "none"}.

{variants and variants + chr(10)}{_figures(revealed)}
The units of the frames are the characters of a forced alignment. Alphabet: `{probe["alphabet"]}`.
Test characters outside it: {sum(probe["unknown_characters"].values())}.
"""


if __name__ == "__main__":
    sys.exit(main())
