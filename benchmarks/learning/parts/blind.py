"""Hides the names of what a benchmark compares, and draws its order, so that nobody can favour one of them."""

import argparse
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from nestmodel import read_config

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Variants = TypeVar("Variants")


def add_models(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--model NAME=CHECKPOINT` to a parser."""
    parser.add_argument(
        "--model", action="append", required=True, metavar="NAME=CHECKPOINT", help="may be repeated, up to 26 times"
    )


def named_models(parser: argparse.ArgumentParser, given: Sequence[str]) -> dict[str, Path]:
    """Returns the checkpoints of `--model` by name.

    Ends the program if a value has another form, there are more values than letters, or two have the same variant and
    seed.
    """
    if len(given) > len(LETTERS) or not all("=" in one for one in given):
        parser.error(f"give --model NAME=CHECKPOINT, and at most {len(LETTERS)} of them")
    models = {name: Path(path) for name, _, path in (one.rpartition("=") for one in given)}
    if len(models) < len(given):
        parser.error("the names of --model must differ")
    if len(set(map(variant_and_seed, models))) < len(models):
        parser.error("two models have the same variant and seed: a name without /SEED has seed 0")
    return models


def variant_and_seed(name: str) -> tuple[str, str]:
    """Returns the parts of a name such as `a/1`; a name without a seed has seed 0."""
    variant, _, seed = name.rpartition("/")
    return (variant, seed) if variant else (name, "0")


def digests_of(models: Mapping[str, Path]) -> str:
    """Returns the contents of checkpoints as JSON, to keep with the settings of a benchmark."""
    return json.dumps({name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in models.items()})


def hide_names(output: Path, models: Mapping[str, Path]) -> dict[str, str]:
    """Copies checkpoints to LETTER.ckpt in a folder; returns the letter of each name, which are drawn once."""
    drawn = dict(zip(draw_once(output / "names.json", list(models)), LETTERS, strict=False))
    for name, letter in drawn.items():
        shutil.copy(models[name], output / f"{letter}.ckpt")
    return {name: drawn[name] for name in models}


def draw_once(path: Path, items: Sequence[Any]) -> list[Any]:
    """Returns items, JSON values, in a drawn order. It is kept in a file: a run that goes on gets the same order."""
    if not path.exists():
        drawn = list(items)
        random.SystemRandom().shuffle(drawn)
        path.write_text(json.dumps(drawn) + "\n", encoding="utf-8")
    kept: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def run_drawn(output: Path, jobs: Mapping[str, Callable[[], None]], at_once: int) -> None:
    """Runs jobs in a drawn order, which is kept in `order.json` in a folder; several at the same time."""
    order = draw_once(output / "order.json", list(jobs))
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda name: jobs[name](), order))


def first_alike(models: Mapping[str, Path]) -> dict[str, str]:
    """Returns, for each name of a checkpoint, the first name whose encoder and features are configured alike."""
    configs = {name: read_config(path) for name, path in models.items()}
    parts = {name: (config.encoder, config.features) for name, config in configs.items()}
    return {name: next(other for other in parts if parts[other] == parts[name]) for name in parts}


def publish(
    output: Path,
    results: Path,
    tables: Callable[[Variants], str],
    *,
    hidden: Variants,
    named: Variants,
    head: Callable[[str], str],
) -> None:
    """Writes the tables with letters to `figures.md`, and then those with names to the results.

    Args:
        output: Folder of the benchmark.
        results: File of the results.
        tables: Returns the tables of variants.
        hidden: The variants, by letter.
        named: The variants, by name.
        head: Returns what stands before the tables in the results, given the SHA-256 of `figures.md`.
    """
    figures = tables(hidden)
    (output / "figures.md").write_text(figures, encoding="utf-8")
    digest = hashlib.sha256(figures.encode()).hexdigest()
    print(f"{output / 'figures.md'}: {digest}; now the letters are resolved")
    results.write_text(head(digest) + tables(named), encoding="utf-8")
