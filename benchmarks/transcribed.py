"""Manifests of transcribed speech, and the transcripts that content probes made of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from nestmodel import ErrorCounts, count_errors, error_difference, error_rate
from nestmodel.evaluate.error_rates import percent

Line = dict[str, Any]
PURPOSES = {
    "choices": "The test lines are those for choices: settings have been or will be chosen on them.",
    "figures": "The test lines are those for figures: no setting was chosen on them.",
}
"""What test lines are used for, as a result says it."""


def read_lines(path: Path) -> list[Line]:
    """Returns the JSON lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def read_manifest(path: Path, limit: int = 0) -> list[Line]:
    """Returns the lines of a NeMo manifest with absolute paths; `limit` of them if it is not 0, evenly spread."""
    lines = read_lines(path)
    for line in lines:
        line["audio_filepath"] = str((path.parent / line["audio_filepath"]).absolute())
    return lines[:: max(1, len(lines) // limit)][:limit] if limit else lines


def without_text(lines: Iterable[Line]) -> list[Line]:
    """Returns lines without their transcripts, for pretraining."""
    return [{key: value for key, value in line.items() if key != "text"} for line in lines]


def read_errors(probe: Path) -> ErrorCounts:
    """Returns the errors in characters of a content probe's trained encoder, added up over the seeds of its heads.

    They are added up over the groups of test utterances that the probe names, from which its intervals are drawn.
    """
    return errors_of(sorted(read_lines(probe / "hypotheses.jsonl"), key=lambda line: str(line["id"])), "trained")


def errors_of(lines: Sequence[Line], features: str) -> ErrorCounts:
    """Returns the errors in characters of lines of `hypotheses.jsonl`, added up over the seeds and over the groups."""
    texts = [line["text"] for line in lines]
    seeds = lines[0][features]
    counts = (count_errors(texts, [one[features][seed] for one in lines], "characters") for seed in seeds)
    return reduce(add, counts).by_group([line["group"] for line in lines])


def variant_table(errors: Mapping[tuple[str, str], ErrorCounts]) -> str:
    """Returns a Markdown table of variants; "" if there is only one.

    Args:
        errors: Errors by variant and seed of pretraining, of the same utterances. Variants are compared with the first
            one, with the seeds that both have.
    """
    variants = list(dict.fromkeys(variant for variant, _ in errors))
    if len(variants) < 2:
        return ""
    first = variants[0]
    lines = [
        f"| variant | CER | CER by seed of pretraining | minus {first} | minus {first}, by seed |",
        "|---|---|---|---|---|",
    ]
    for variant in variants:
        seeds = [seed for name, seed in errors if name == variant]
        both = [seed for seed in seeds if (first, seed) in errors] if variant != first else []
        total = reduce(add, (errors[variant, seed] for seed in seeds))
        singles = ", ".join(f"{seed}: {100 * error_rate(errors[variant, seed]).rate:.1f}" for seed in seeds)
        together, apart = "", ""
        if both:
            mine, other = (reduce(add, (errors[name, seed] for seed in both)) for name in (variant, first))
            together = percent(error_difference(mine, other))
            differences = {seed: error_difference(errors[variant, seed], errors[first, seed]) for seed in both}
            apart = ", ".join(f"{seed}: {100 * one.value:.1f}" for seed, one in differences.items())
        lines.append(f"| {variant} | {percent(error_rate(total))} | {singles} | {together} | {apart} |")
    note = "Intervals cover the choice of scenes, not that of seeds: compare a difference with the spread of seeds."
    return "\n".join([*lines, "", note]) + "\n"
