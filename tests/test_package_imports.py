"""Compares the table of packages in docs/architecture.md with the imports in the sources."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDERS = {"nestguard": "nestguard", "nestdata": "nestdata", "nestmodel": "nestmodel", "nestcli": "cli"}


def table() -> dict[str, set[str]]:
    """Returns the packages that each package imports, as documented."""
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \|(.*)\|$", text, re.MULTILINE)
    return {package: set(re.findall(r"`([\w.]+)`", imports)) for package, imports in rows}


def package_of(module: str, packages: set[str]) -> str | None:
    """Returns the innermost package that contains a module."""
    found = [package for package in packages if module == package or module.startswith(f"{package}.")]
    return max(found, key=len, default=None)


def modules() -> Iterator[tuple[str, Path]]:
    for root, folder in FOLDERS.items():
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            parts = path.relative_to(REPOSITORY / folder).with_suffix("").parts
            yield ".".join([root, *(part for part in parts if part != "__init__")]), path


@cache
def public_modules(root: str) -> dict[str, str]:
    """Returns the module of every name that a top-level package exports lazily."""
    stub = REPOSITORY / FOLDERS[root] / "__init__.pyi"
    if not stub.exists():
        return {}
    found = {}
    for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name: f"{root}.{node.module}" for alias in node.names}
    return found


@cache
def imports_of(module: str, path: Path) -> list[str]:
    """Returns the modules that a module imports, at the top or inside functions, but not for types alone."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parent = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                origin = ".".join([*parent[: len(parent) - node.level + 1], *([origin] if origin else [])])
            for alias in node.names:
                # Inside a top-level package, a public name counts as an import of the module that defines it. Imported
                # from another one, it belongs to the top, and the module that defines it does not matter.
                is_own = origin == module.split(".")[0]
                found.append(public_modules(origin).get(alias.name, origin) if is_own and origin in FOLDERS else origin)
    return found


@cache
def package_imports() -> dict[str, set[str]]:
    packages = set(table())
    found: dict[str, set[str]] = {package: set() for package in packages}
    for module, path in modules():
        here = package_of(module, packages)
        assert here is not None, f"{path} is in no package of docs/architecture.md"
        for imported in imports_of(module, path):
            there = package_of(imported, packages)
            if there is not None and there != here:
                found[here].add(there)
    return found


def test_tree_names_every_package_once() -> None:
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    tree = text.partition("```text\n")[2].partition("```")[0]
    documented, above = [], [""]
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        above[depth:] = [line.split()[0]]
        documented.append(".".join(above))
    sources = [module for module, path in modules() if path.name == "__init__.py"]
    assert sorted(documented) == sorted(sources)


@pytest.mark.parametrize("package", sorted(table()))
def test_documented_imports_match_the_sources(package: str) -> None:
    assert package_imports()[package] == table()[package]


def test_imports_between_packages_have_no_cycle() -> None:
    TopologicalSorter(package_imports()).prepare()


def test_imports_between_modules_have_no_cycle() -> None:
    names = {module for module, _ in modules()}
    TopologicalSorter({name: names.intersection(imports_of(name, path)) for name, path in modules()}).prepare()
