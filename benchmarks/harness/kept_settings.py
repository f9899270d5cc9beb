"""Settings and order of a benchmark that continues where an earlier call ended.

Results of both calls become one report, so both must have had the same settings.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def keep_settings(output: Path, settings: Mapping[str, str | int | bool]) -> None:
    """Writes settings to `settings.json` in the folder of a benchmark, or compares them with the first call's.

    Raises:
        SystemExit: The first call had other settings.
    """
    path = output / "settings.json"
    if not path.exists():
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return
    first = json.loads(path.read_text(encoding="utf-8"))
    names = [name for name in {**first, **settings} if first.get(name) != settings.get(name)]
    if names:
        changes = "; ".join(f"{name} was {first.get(name)!r} and is {settings.get(name)!r}" for name in names)
        raise SystemExit(f"{path}: {changes}. Give the same settings, or another output folder.")


def draw_once(path: Path, items: Sequence[Any]) -> list[Any]:
    """Returns items, JSON values, in a drawn order, which is kept in a file for a run that continues."""
    if not path.exists():
        drawn = list(items)
        random.SystemRandom().shuffle(drawn)
        path.write_text(json.dumps(drawn) + "\n", encoding="utf-8")
    kept: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept
