"""Draws the order in which a benchmark compares things under hidden names, so that nobody can favour one of them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_once(path: Path, items: Sequence[Any]) -> list[Any]:
    """Returns items, JSON values, in a drawn order. It is kept in a file: a run that goes on gets the same order."""
    if not path.exists():
        drawn = list(items)
        random.SystemRandom().shuffle(drawn)
        path.write_text(json.dumps(drawn) + "\n", encoding="utf-8")
    kept: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept
