"""Checks with `ast` what modules import, and that docs/architecture.md says which packages they may import from."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import pytorch_lightning as pl

import nestdata

REPOSITORY = Path(__file__).parents[1]
# Modules of nestdata that the other packages may import from, in addition to the public names.
SHARED_MODULES = {
    *("nestdata.class_path", "nestdata.config_checks", "nestdata.field_docs", "nestdata.filters", "nestdata.output"),
    *("nestdata.input_format", "nestdata.plan.summary", "nestdata.stateless_rng", "nestdata.wrong_path"),
}


def modules(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    assert found
    return found


def imports_of(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yields (module, name) for every absolute import anywhere in a file; the name is None for a whole module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((str(node.module), alias.name) for alias in node.names)


def packages_of(path: Path) -> set[str]:
    return {module.split(".")[0] for module, _ in imports_of(path)}


def test_nestguard_imports_only_the_standard_library() -> None:
    used = set().union(*map(packages_of, modules("nestguard")))
    assert used <= {*sys.stdlib_module_names, "nestguard"}


def test_nestdata_imports_no_trainer() -> None:
    assert [path for path in modules("nestdata") if packages_of(path) & {"pytorch_lightning", "lightning"}] == []


def test_only_public_names_and_shared_modules_of_nestdata_are_used_outside_of_it() -> None:
    public = {("nestdata", name) for name in nestdata.__all__}
    for path in modules("nestmodel", "cli"):
        used = {(module, name) for module, name in imports_of(path) if module.split(".")[0] == "nestdata"}
        others = used - public
        assert {module for module, _ in others} <= SHARED_MODULES, path
        assert not [name for _, name in others if name is None or name.startswith("_")], path


def test_nestmodel_imports_nothing_for_types_alone() -> None:
    """Such an import would hide a cycle from the checks of packages and modules."""
    assert [path for path in modules("nestmodel") if ("typing", "TYPE_CHECKING") in imports_of(path)] == []


def test_of_the_network_only_the_encoder_imports_code_for_gpus() -> None:
    found = {
        path.stem
        for path in (REPOSITORY / "nestmodel" / "nn").glob("*.py")
        if any(module.startswith("nestmodel.nn.gpu") for module, _ in imports_of(path))
    }
    assert found == {"encoder"}


def test_no_private_name_of_a_lightning_class_is_overridden() -> None:
    bases = (pl.LightningModule, pl.LightningDataModule, pl.Callback, pl.Trainer)
    own = set()
    for path in modules("nestmodel/training"):
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for member in vars(importlib.import_module(name)).values():
            if inspect.isclass(member) and issubclass(member, bases) and member.__module__.startswith("nestmodel"):
                own.add(member)
    assert own
    for subclass in own:
        # torch and abc also set private attributes on the subclass: those are not methods of ours.
        ours = {name for name, value in vars(subclass).items() if inspect.isfunction(value) and name.startswith("_")}
        theirs = {name for base in subclass.__mro__ if base not in own for name in vars(base)}
        assert {name for name in ours & theirs if not name.startswith("__")} == set(), subclass


def test_one_module_imports_torchaudio() -> None:
    """torchaudio has no release after 2.11. Only this module changes when another library replaces it."""
    found = {
        path.name
        for path in modules("nestguard", "nestdata", "nestmodel", "cli")
        if any(module.split(".")[0] == "torchaudio" for module, _ in imports_of(path))
    }
    assert found == {"filters.py"}


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


def named_modules() -> Iterator[tuple[str, Path]]:
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
def modules_imported_by(module: str, path: Path) -> list[str]:
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
    for module, path in named_modules():
        here = package_of(module, packages)
        assert here is not None, f"{path} is in no package of docs/architecture.md"
        for imported in modules_imported_by(module, path):
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
    sources = [module for module, path in named_modules() if path.name == "__init__.py"]
    assert sorted(documented) == sorted(sources)


@pytest.mark.parametrize("package", sorted(table()))
def test_documented_imports_match_the_sources(package: str) -> None:
    assert package_imports()[package] == table()[package]


def test_imports_between_packages_have_no_cycle() -> None:
    TopologicalSorter(package_imports()).prepare()


def test_imports_between_modules_have_no_cycle() -> None:
    names = {module for module, _ in named_modules()}
    TopologicalSorter(
        {name: names.intersection(modules_imported_by(name, path)) for name, path in named_modules()}
    ).prepare()
