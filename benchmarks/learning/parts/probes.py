"""Probes of frozen encoders: runs them once, reads their errors in characters, and compares variants in tables."""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import run_command
from benchmarks.harness.report import table_text
from benchmarks.learning.parts.manifests import PURPOSES, Line, read_lines
from nestmodel import ErrorCounts, Estimate, count_errors, error_difference, error_rate
from nestmodel.evaluate.error_rates import percent


def probes_parser(
    description: str | None, *, results: str, probe_options: str = "", quick: Mapping[str, Any] | None = None
) -> argparse.ArgumentParser:
    """Returns a parser with what all benchmarks of probes need.

    Args:
        description: Docstring of the benchmark.
        results: Default of `--results`.
        probe_options: Default of `--probe-options`.
        quick: Values that `--quick` sets.
    """
    parser = benchmark_parser(description, quick=quick or {})
    parser.set_defaults(results=Path(results))
    parser.add_argument("output", type=Path)
    parser.add_argument("--purpose", choices=PURPOSES, required=True, help="what the test lines are used for")
    parser.add_argument("--probe-options", default=probe_options, help="further flags of `nestmodel probe characters`")
    return parser


def run_probe(output: Path, name: str, task: str) -> None:
    """Runs `nestmodel probe characters` in a folder, and writes to NAME there, unless an earlier call did."""
    if not (output / name / "probe.json").exists():
        run_command(f"nestmodel probe characters {task} --overwrite -o {name}", output)


def read_probe(probe: Path) -> dict[str, Any]:
    """Returns what a probe wrote to `probe.json` in its folder."""
    found: dict[str, Any] = json.loads((probe / "probe.json").read_text(encoding="utf-8"))
    return found


def accuracy(score: Mapping[str, float]) -> str:
    """Returns an accuracy of a probe of labels in %, with its interval."""
    return percent(Estimate(score["accuracy"], score["low"], score["high"]))


def read_errors(probe: Path, features: str = "trained") -> ErrorCounts:
    """Returns the errors in characters of a content probe with some features, added up over the seeds of its heads.

    They are added up over the groups of test utterances that the probe names, from which its intervals are drawn.
    """
    return errors_of(read_lines(probe / "hypotheses.jsonl"), features)


def errors_of(lines: Sequence[Line], features: str) -> ErrorCounts:
    """Returns the errors in characters of lines of `hypotheses.jsonl`, added up over the seeds and over the groups."""
    lines = sorted(lines, key=lambda line: str(line["id"]))
    texts = [line["text"] for line in lines]
    seeds = lines[0][features]
    counts = (count_errors(texts, [one[features][seed] for one in lines], "characters") for seed in seeds)
    return reduce(add, counts).by_group([line["group"] for line in lines])


Runs = Mapping[tuple[str, str], ErrorCounts]
"""Errors by variant and seed of pretraining, of the same utterances."""


def variant_table(errors: Runs, untrained: Runs | None = None) -> str:
    """Returns a Markdown table of variants; "" if it would compare nothing.

    Variants are compared with the first one, with the seeds that both have, and with their untrained encoders if there
    are any.
    """
    variants = list(dict.fromkeys(variant for variant, _ in errors))
    first = variants[0]
    columns = {"untrained": untrained} if untrained else {}
    if len(variants) > 1:
        others = {key: errors[first, key[1]] for key in errors if key[0] != first and (first, key[1]) in errors}
        columns[first] = others
    if not columns:
        return ""
    names = ["variant", "CER", "CER by seed of pretraining", *(["untrained"] if untrained else [])]
    names += [name for baseline in columns for name in (f"minus {baseline}", f"minus {baseline}, by seed")]
    rows = []
    for variant in variants:
        of_variant = {key: counts for key, counts in errors.items() if key[0] == variant}
        singles = ", ".join(f"{seed}: {100 * error_rate(counts).rate:.1f}" for (_, seed), counts in of_variant.items())
        cells = [variant, percent(error_rate(reduce(add, of_variant.values()))), singles]
        if untrained:
            cells.append(percent(error_rate(reduce(add, (untrained[key] for key in of_variant)))))
        for baseline in columns.values():
            cells += _differences(of_variant, baseline)
        rows.append(cells)
    note = "Intervals cover the choice of scenes, not that of seeds: compare a difference with the spread of seeds."
    return f"{table_text(names, rows)}\n\n{note}\n"


def _differences(errors: Runs, baseline: Runs) -> tuple[str, str]:
    """Returns the difference of all runs that both have, and those of single seeds."""
    both = [key for key in errors if key in baseline]
    if not both:
        return "", ""
    ours, theirs = (reduce(add, (one[key] for key in both)) for one in (errors, baseline))
    together = error_difference(ours, theirs)
    apart = (f"{key[1]}: {100 * error_difference(errors[key], baseline[key]).value:.1f}" for key in both)
    return percent(together), ", ".join(apart)
