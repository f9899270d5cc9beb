"""Manifests of transcribed speech, and the transcripts that content probes made of it."""

import argparse
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
    return [lines[number * len(lines) // limit] for number in range(limit)] if 0 < limit < len(lines) else lines


def without_text(lines: Iterable[Line]) -> list[Line]:
    """Returns lines without their transcripts, for pretraining."""
    return [{key: value for key, value in line.items() if key != "text"} for line in lines]


def add_languages(parser: argparse.ArgumentParser, option: str, *, required: bool = False) -> None:
    """Adds an option `NAME=TRAIN,TEST` to a parser, which may be repeated; its value is a list of `language`."""
    text = "a language, and its manifests with texts; may be repeated"
    parser.add_argument(
        option, type=language, action="append", default=[], required=required, metavar="NAME=TRAIN,TEST", help=text
    )


def language(text: str) -> tuple[str, str, str]:
    """Returns the name and both absolute paths of `NAME=TRAIN,TEST`."""
    name, _, paths = text.partition("=")
    train, _, test = paths.partition(",")
    if not (name.isidentifier() and train and test) or "," in test:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=TRAIN,TEST, with a name of letters and digits")
    return name, str(Path(train).absolute()), str(Path(test).absolute())


def read_probe(probe: Path) -> dict[str, Any]:
    """Returns what a probe wrote to `probe.json` in its folder."""
    found: dict[str, Any] = json.loads((probe / "probe.json").read_text(encoding="utf-8"))
    return found


def read_errors(probe: Path, features: str = "trained") -> ErrorCounts:
    """Returns the errors in characters of a content probe with some features, added up over the seeds of its heads.

    They are added up over the groups of test utterances that the probe names, from which its intervals are drawn.
    """
    return errors_of(sorted(read_lines(probe / "hypotheses.jsonl"), key=lambda line: str(line["id"])), features)


def errors_of(lines: Sequence[Line], features: str) -> ErrorCounts:
    """Returns the errors in characters of lines of `hypotheses.jsonl`, added up over the seeds and over the groups."""
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
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for variant in variants:
        of_variant = {key: counts for key, counts in errors.items() if key[0] == variant}
        singles = ", ".join(f"{seed}: {100 * error_rate(counts).rate:.1f}" for (_, seed), counts in of_variant.items())
        cells = [variant, percent(error_rate(reduce(add, of_variant.values()))), singles]
        if untrained:
            cells.append(percent(error_rate(reduce(add, (untrained[key] for key in of_variant)))))
        for baseline in columns.values():
            cells += _differences(of_variant, baseline)
        lines.append(f"| {' | '.join(cells)} |")
    note = "Intervals cover the choice of scenes, not that of seeds: compare a difference with the spread of seeds."
    return "\n".join([*lines, "", note]) + "\n"


def _differences(errors: Runs, baseline: Runs) -> tuple[str, str]:
    """Returns the difference of all runs that both have, and those of single seeds."""
    both = [key for key in errors if key in baseline]
    if not both:
        return "", ""
    together = error_difference(*(reduce(add, (one[key] for key in both)) for one in (errors, baseline)))
    apart = (f"{key[1]}: {100 * error_difference(errors[key], baseline[key]).value:.1f}" for key in both)
    return percent(together), ", ".join(apart)
