"""Checks with `ast` what modules import, beyond the table of packages that `test_package_imports.py` checks."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

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
