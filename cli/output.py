"""Results on stdout: JSON, or text in which paths and ids appear exactly as they are."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console


def console() -> Console:
    """Returns a console that does not colour numbers, break lines or read `[...]` in an id as markup."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def print_json(result: object) -> None:
    """Prints plain values as indented JSON; paths become strings."""
    print(json.dumps(result, indent=2, default=os.fspath))


def rejected_text(rejected: Mapping[str, int], directory: Path | None) -> str:
    """Returns the number of rejected inputs by reason, and the file in the directory that lists them."""
    counts = ", ".join(f"{number} {reason}" for reason, number in rejected.items())
    return f"rejected: {counts}" + ("" if directory is None else f"; see {directory / 'rejected.jsonl'}")
