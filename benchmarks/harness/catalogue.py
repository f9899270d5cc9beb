"""Finds the benchmarks: the modules that define `QUICK`, in the folders of `benchmarks/`.

A folder holds benchmarks that measure the same part. `QUICK` is the arguments with which a benchmark is tried on the
demo corpus, where `{speech}` and `{noise}` stand for its manifests; None if it needs more than that, such as real
speech, NeMo or a GPU.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.repository import REPOSITORY


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
    for path in sorted((REPOSITORY / "benchmarks").glob("*/*.py")):
        text = path.read_text(encoding="utf-8")
        if quick := re.search(r"^QUICK = (.+)$", text, re.MULTILINE):
            name = path.parent.name if path.stem == "__main__" else path.stem
            assert name not in found, f"two benchmarks are called {name}"
            claim = " ".join((ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split())
            found[name] = Benchmark(path, claim, ast.literal_eval(quick[1]))
    return found
