"""The Markdown of a result: title, conditions, commit, paragraphs and tables."""

import os
import platform
import sys
import textwrap
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness.repository import REPOSITORY, commit_line

WIDTH = 120


class Report:
    """Prints a result while it is measured, and writes it to a file as well if one is given."""

    def __init__(self, title: str, script: str, conditions: str, *, results: Path | None = None) -> None:
        """Prints the head of the result.

        Args:
            title: Title.
            script: `__file__` of the benchmark.
            conditions: How it was measured: how often, on which machine, and with which versions.
            results: File that gets the Markdown as well.
        """
        self.results = results
        if results:
            results.write_text("", encoding="utf-8")
        path = Path(script).resolve().relative_to(REPOSITORY).as_posix()
        self.markdown(f"# {title}\n")
        self.text(f"Made by `{path}`: {conditions}")
        self.markdown(commit_line() + "\n")
        name = Path(path).parent.name if path.endswith("__main__.py") else Path(path).stem
        options = " ".join(Path(one).name if os.sep in one else one for one in sys.argv[1:])
        self.markdown(f"    python -m benchmarks run {name} {options}".rstrip() + "\n")

    def section(self, title: str) -> None:
        """Prints a heading."""
        self.markdown(f"## {title}\n")

    def text(self, text: str) -> None:
        """Prints a paragraph, wrapped."""
        self.markdown(
            textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"
        )

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Prints a table, each row as soon as it is known."""
        self.markdown(f"{table_row(columns)}\n|{'---|' * len(columns)}")
        for cells in rows:
            self.markdown(table_row(cells))
        self.markdown("")

    def markdown(self, text: str) -> None:
        """Prints text that is already Markdown."""
        print(text, flush=True)
        if self.results:
            with self.results.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def table_row(cells: Iterable[object]) -> str:
    """Returns a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a whole table, without a line break at its end."""
    return "\n".join([table_row(columns), f"|{'---|' * len(columns)}", *map(table_row, rows)])


def machine(cores: str = "cores") -> str:
    """Returns the number of cores, with the word for them, and the architecture of this machine."""
    return f"{os.cpu_count()} {cores} ({platform.machine()})"


def versions(*packages: str) -> str:
    """Returns packages with the versions that are installed."""
    return ", ".join(f"{package} {version(package)}" for package in packages)
