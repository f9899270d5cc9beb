"""Hides the names of what a benchmark compares, and draws its order, so that nobody can favour one of them."""

import argparse
import hashlib
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestmodel import read_config

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def add_models(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--model NAME=CHECKPOINT` to a parser."""
    parser.add_argument(
        "--model", action="append", required=True, metavar="NAME=CHECKPOINT", help="may be repeated, up to 26 times"
    )


def check_models(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """Ends the program if a value of `--model` has another form, or there are more values than letters."""
    if len(given) > len(LETTERS) or not all("=" in one for one in given):
        parser.error(f"give --model NAME=CHECKPOINT, and at most {len(LETTERS)} of them")
    if len({name for name, _, _ in (one.rpartition("=") for one in given)}) < len(given):
        parser.error("the names of --model must differ")


def named_models(given: Sequence[str]) -> dict[str, Path]:
    """Returns the checkpoints of `--model` by name."""
    return {name: Path(path) for name, _, path in (one.rpartition("=") for one in given)}


def digests_of(models: Mapping[str, Path]) -> str:
    """Returns the contents of checkpoints as JSON, to keep with the settings of a benchmark."""
    return json.dumps({name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in models.items()})


def hide_names(output: Path, models: Mapping[str, Path]) -> dict[str, str]:
    """Copies checkpoints to LETTER.ckpt in a folder; returns the name of each letter, which are drawn once."""
    letters = dict(zip(LETTERS, draw_once(output / "names.json", list(models)), strict=False))
    for letter, name in letters.items():
        shutil.copy(models[name], output / f"{letter}.ckpt")
    return letters


def draw_once(path: Path, items: Sequence[Any]) -> list[Any]:
    """Returns items, JSON values, in a drawn order. It is kept in a file: a run that goes on gets the same order."""
    if not path.exists():
        drawn = list(items)
        random.SystemRandom().shuffle(drawn)
        path.write_text(json.dumps(drawn) + "\n", encoding="utf-8")
    kept: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def first_alike(models: Mapping[str, Path]) -> dict[str, str]:
    """Returns, for each name of a checkpoint, the first name whose encoder and features are configured alike."""
    configs = {name: read_config(path) for name, path in models.items()}
    parts = {name: (config.encoder, config.features) for name, config in configs.items()}
    return {name: next(other for other in parts if parts[other] == parts[name]) for name in parts}
