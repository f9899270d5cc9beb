"""Compares the table of rooms in docs/architecture.md with the imports in the sources."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDERS = {"nestguard": "nestguard", "nestdata": "nestdata", "nestmodel": "nestmodel", "nestcli": "cli"}


def table() -> dict[str, set[str]]:
    """Returns the rooms that each room may import, as documented."""
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \|(.*)\|$", text, re.MULTILINE)
    return {room: set(re.findall(r"`([\w.]+)`", imports)) for room, imports in rows}


def room_of(module: str, rooms: set[str]) -> str | None:
    """Returns the innermost room that holds a module."""
    found = [room for room in rooms if module == room or module.startswith(f"{room}.")]
    return max(found, key=len, default=None)


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in FOLDERS.items():
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            parts = path.relative_to(REPOSITORY / folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


@cache
def public_modules(package: str) -> dict[str, str]:
    """Returns the module of every name that a package exports lazily."""
    stub = REPOSITORY / FOLDERS[package] / "__init__.pyi"
    if not stub.exists():
        return {}
    found = {}
    for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name: f"{package}.{node.module}" for alias in node.names}
    return found


def imports_of(module: str, path: Path) -> Iterator[str]:
    """Yields the project's modules that a module imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parent = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                origin = ".".join([*parent[: len(parent) - node.level + 1], *([origin] if origin else [])])
            for alias in node.names:
                # Within a package, importing a public name means importing the module that defines it.
                is_own = origin == module.split(".")[0]
                yield public_modules(origin).get(alias.name, origin) if is_own and origin in FOLDERS else origin


@cache
def arrows() -> dict[str, set[str]]:
    rooms = set(table())
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for module, path in modules():
        here = room_of(module, rooms)
        assert here is not None, f"{path} is in no room of docs/architecture.md"
        for imported in imports_of(module, path):
            there = room_of(imported, rooms)
            # Another package is imported through its public names, so the room that defines a name does not matter.
            if there is not None and there.split(".")[0] != here.split(".")[0] and "." in there:
                there = there if "." in imported and imported != there.split(".")[0] else there.split(".")[0]
            if there is not None and there != here:
                found[here].add(there)
    return found


@pytest.mark.parametrize("room", sorted(table()))
def test_the_documented_imports_of_a_room_are_the_ones_in_its_sources(room: str) -> None:
    assert arrows()[room] == table()[room]


def test_imports_between_rooms_form_no_cycle() -> None:
    remaining = dict(arrows())
    while remaining:
        free = [room for room, imports in remaining.items() if not imports & set(remaining)]
        assert free, f"a cycle among {sorted(remaining)}"
        for room in free:
            del remaining[room]
