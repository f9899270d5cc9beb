"""Keeps what is compared under hidden names and in a drawn order, so that nobody can watch one side and favour it.

The draw is kept in a file of the output folder, because a run that was interrupted goes on with the same names.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_once(path: Path, items: Sequence[Any], settings: Mapping[str, Any]) -> list[Any]:
    """Returns items in a drawn order: that in `path` if an earlier run wrote it, otherwise a new one.

    Args:
        path: JSON file that keeps the order and the settings.
        items: What is compared; JSON values.
        settings: What the results of every item depend on; values are compared as text.

    Raises:
        SystemExit: The earlier run had other items or settings, so its results must not be mixed with new ones.
    """
    texts = {name: str(value) for name, value in settings.items()}
    if not path.exists():
        drawn = list(items)
        random.SystemRandom().shuffle(drawn)
        path.write_text(json.dumps({"settings": texts, "order": drawn}, indent=2) + "\n")
    kept = json.loads(path.read_text())
    wanted = json.loads(json.dumps(list(items)))
    if kept["settings"] != texts or sorted(kept["order"]) != sorted(wanted):
        raise SystemExit(f"{path} is of a run with other settings. Give another output folder, or remove this one.")
    return list(kept["order"])
