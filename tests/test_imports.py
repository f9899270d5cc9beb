import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nestdata

REPOSITORY = Path(__file__).parents[1]
MODULES = {
    package: sorted((REPOSITORY / folder).rglob("*.py"))
    for package, folder in {
        "nestguard": "nestguard",
        "nestdata": "nestdata",
        "nestmodel": "nestmodel",
        "nestcli": "cli",
    }.items()
}
# Modules of nestdata that the other packages may import from, in addition to the public names.
SHARED_MODULES = {
    *("nestdata.config_checks", "nestdata.field_docs", "nestdata.output"),
    *("nestdata.plan.summary", "nestdata.stateless_rng"),
}


def imports_of(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yields (module, name) for every import anywhere in a file; the name is None for a whole module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            is_inside = node.level == 0 or REPOSITORY in path.parents[node.level - 1].parents
            assert is_inside, f"{path}: a relative import that leaves its package"
            module = ".".join(filter(None, [_package(path, node.level), node.module]))
            yield from ((module, alias.name) for alias in node.names)


def _package(path: Path, level: int) -> str:
    """Returns the package that a relative import with `level` dots begins at; empty for an absolute import."""
    if level == 0:
        return ""
    first, *rest = path.parents[level - 1].relative_to(REPOSITORY).parts
    return ".".join(["nestcli" if first == "cli" else first, *rest])


def packages_of(path: Path) -> set[str]:
    return {module.split(".")[0] for module, _ in imports_of(path)}


def test_relative_imports_are_resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(globals(), "REPOSITORY", tmp_path)
    path = tmp_path / "cli" / "commands" / "plan.py"
    path.parent.mkdir(parents=True)
    path.write_text("from . import probe\nfrom ..output import print_json\nfrom nestdata import PlanConfig\n")
    assert set(imports_of(path)) == {
        ("nestcli.commands", "probe"),
        ("nestcli.output", "print_json"),
        ("nestdata", "PlanConfig"),
    }


def paths_with(packages: set[str], *folders: str) -> list[Path]:
    """Returns the files of folders that import one of these packages."""
    return [path for folder in folders for path in MODULES[folder] if packages_of(path) & packages]


def test_the_packages_are_found() -> None:
    assert {package: bool(files) for package, files in MODULES.items()} == dict.fromkeys(MODULES, True)


def test_nestguard_imports_only_the_standard_library() -> None:
    used = set().union(*map(packages_of, MODULES["nestguard"]))
    assert used <= {*sys.stdlib_module_names, "nestguard"}


def test_packages_import_each_other_in_one_direction() -> None:
    assert paths_with({"nestmodel", "nestcli", "cli", "pytorch_lightning", "lightning"}, "nestdata") == []
    assert paths_with({"nestcli", "cli"}, "nestmodel") == []


def test_only_public_names_and_shared_modules_of_nestdata_are_used_outside_of_it() -> None:
    public = {("nestdata", name) for name in nestdata.__all__}
    for path in MODULES["nestmodel"] + MODULES["nestcli"]:
        used = {(module, name) for module, name in imports_of(path) if module.split(".")[0] == "nestdata"}
        others = used - public
        assert {module for module, _ in others} <= SHARED_MODULES, path
        assert not [name for _, name in others if name is None or name.startswith("_")], path


def test_project_names_that_benchmarks_import_exist() -> None:
    missing = [
        (path, module, name)
        for path in sorted((REPOSITORY / "benchmarks").rglob("*.py"))
        for module, name in imports_of(path)
        if module.split(".")[0] in MODULES and name and not hasattr(importlib.import_module(module), name)
    ]
    assert missing == []
