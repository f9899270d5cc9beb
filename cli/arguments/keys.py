"""The configuration keys of `fit`, `validate` and `preflight`, known without importing Lightning.

`keys.txt` lists them, one in a line; a group, which takes a file, ends with a dot. A test compares the list with the
real parser. Suggestions and completion read it.
"""

import functools
from pathlib import Path

OUR_SECTIONS = ("data", "guard", "model")
"""Sections whose keys are all in the list. Lightning may add keys to `trainer`."""

SEEDS = ("data.plan.seed", "model.config.seed")
"""Settings that follow from `seed_everything`."""


@functools.cache
def keys() -> tuple[str, ...]:
    """Returns the keys that hold a value."""
    return tuple(line for line in _lines() if not line.endswith("."))


@functools.cache
def key_groups() -> tuple[str, ...]:
    """Returns the keys that hold other keys, such as `data.plan`."""
    return tuple(line.removesuffix(".") for line in _lines() if line.endswith("."))


def section_keys(section: str) -> list[str]:
    """Returns the keys and groups directly below a section, such as `corpus` and `plan` of `data`."""
    names = [name.removeprefix(f"{section}.") for name in (*keys(), *key_groups()) if name.startswith(f"{section}.")]
    return sorted(name for name in names if "." not in name)


def is_unknown(key: str) -> bool:
    """Returns whether jsonargparse would certainly reject a dotted key."""
    path = key.removesuffix("+").split(".")
    parents = {".".join(path[:end]) for end in range(1, len(path) + 1)}
    return path[0] in OUR_SECTIONS and key not in key_groups() and parents.isdisjoint(keys())


def _lines() -> list[str]:
    return (Path(__file__).parents[1] / "keys.txt").read_text(encoding="utf-8").split()
