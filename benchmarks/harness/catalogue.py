"""Finds the benchmarks: the modules of each folder that define `QUICK`.

A folder holds benchmarks that measure the same part. `QUICK` is the arguments with which a benchmark is tried on the
demo corpus, where `{speech}` and `{noise}` stand for its manifests; None if it needs more than that, such as real
speech or NeMo.
"""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.repository import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
FOLDERS = ("batches", "guard", "learning", "model", "prepare")

GPU = BENCHMARKS / "gpu" / "__main__.py"
"""A benchmark that is not found by `QUICK`. It is not tried on the demo corpus."""


class Benchmark(NamedTuple):
    """A benchmark that can be run by its name."""

    path: Path
    claim: str
    """First paragraph of its docstring."""

    quick: tuple[str, ...] | None
    """Arguments with which it is tried; None if the demo corpus is not enough."""

    def command(self, arguments: tuple[str, ...] | list[str]) -> list[str]:
        """Returns the arguments of Python that run it."""
        module = self.path.relative_to(REPOSITORY).with_suffix("")
        return ["-m", ".".join(part for part in module.parts if part != "__main__"), *arguments]


def catalogue() -> dict[str, Benchmark]:
    """Returns all benchmarks by name, grouped by folder."""
    found: dict[str, Benchmark] = {}
    for folder in FOLDERS:
        for path in sorted((BENCHMARKS / folder).glob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            values = _constants(tree)
            if "QUICK" in values:
                assert path.stem not in found, f"two benchmarks are called {path.stem}"
                found[path.stem] = Benchmark(path, _claim(tree), ast.literal_eval(values["QUICK"]))
    return {**found, "gpu": Benchmark(GPU, _claim(ast.parse(GPU.read_text(encoding="utf-8"))), None)}


def _constants(tree: ast.Module) -> Mapping[str, ast.expr]:
    """Returns the values of names that a module sets at its top level."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _claim(tree: ast.Module) -> str:
    return " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
