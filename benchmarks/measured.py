"""Tells whether the code that a result was measured with has changed since.

    python benchmarks/measured.py                                    # the results that are stale, and why
    python benchmarks/measured.py --accept "REASON" results/plan_2cores_2026-11.md
    python benchmarks/measured.py --moved benchmarks/old.py benchmarks/room/new.py

A result has a line such as

    Measures `benchmarks/batches/plan.py`, `nestdata/plan`: code 0123456789ab at commit 0123456.

The digest covers these files and folders; for Python, without docstrings, comments and formatting. Who changes the
code measures again, or accepts the change with the reason why the figures stand, which is added to the line. The
reasons of earlier changes leave the line; they are in the history of the file. Who moves a file names it anew in the
results first, since paths are part of the digest, and then accepts the move.
"""

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
_LINE = re.compile(r"^Measures ((?:`[^`]+`(?:, )?)+): (code [0-9a-f]{12} at commit .+)\.$", re.MULTILINE)
_DIGITS = 12


class Measured(NamedTuple):
    """What the line of a result says."""

    paths: list[str]
    """Files and folders, relative to the root of the repository."""

    codes: list[str]
    """Digest of the code that was measured, and that of later code which gives the same figures."""


def measured_line(*paths: str) -> str:
    """Returns the line for a result that is measured now.

    Args:
        paths: Files and folders whose change would change the figures, relative to the root of the repository.
    """
    names = ", ".join(f"`{path}`" for path in paths)
    changed = " with changes" if _git("status", "--porcelain", "--", *paths) else ""
    return f"Measures {names}: code {digest(paths)} at commit {_git('rev-parse', '--short', 'HEAD')}{changed}."


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()


def read_measured(text: str) -> Measured | None:
    """Returns what a result says that it measures; None if it does not."""
    found = _LINE.search(text)
    if found is None:
        return None
    return Measured(re.findall(r"`([^`]+)`", found[1]), re.findall(r"\bcode ([0-9a-f]{12})\b", found[2]))


def is_stale(measured: Measured, root: Path = REPOSITORY) -> bool:
    """Returns whether the present code differs from all code for which the figures are known to hold."""
    return digest(measured.paths, root) not in measured.codes


def digest(paths: Sequence[str], root: Path = REPOSITORY) -> str:
    """Returns the first hexadecimal digits of the SHA-256 of files and folders, in any order of them.

    Raises:
        SystemExit: A path does not exist.
    """
    contents = {}
    for path in paths:
        if not (root / path).exists():
            raise SystemExit(f"{path}: there is no such file or folder under {root}.")
        for file in [root / path] if (root / path).is_file() else (root / path).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                contents[file.relative_to(root).as_posix()] = _content_json(file.suffix, file.read_bytes())
    text = ", ".join(f"{json.dumps(name)}: {content}" for name, content in sorted(contents.items()))
    return hashlib.sha256(f"{{{text}}}".encode()).hexdigest()[:_DIGITS]


@cache  # most files are part of several results
def _content_json(suffix: str, content: bytes) -> str:
    if suffix in (".py", ".pyi"):
        return json.dumps(_shape(ast.parse(content)))
    return json.dumps(hashlib.sha256(content).hexdigest())


def _shape(node: Any) -> Any:
    """Returns the names and values of a syntax tree, without strings that are statements.

    Empty fields are left out, because Python versions differ in which ones a node has.
    """
    if isinstance(node, list):
        return [_shape(each) for each in node if not _is_docstring(each)]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds an empty string at the end of some formats
        node = ast.JoinedStr([part for part in node.values if not (isinstance(part, ast.Constant) and not part.value)])
    fields = ((name, _shape(value)) for name, value in ast.iter_fields(node) if value not in (None, []))
    return [type(node).__name__, *fields]


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def accept(path: Path, reason: str) -> None:
    """Adds the present code to the line of a result, in place of other code that was accepted.

    Raises:
        SystemExit: The result does not say what it measures.
    """
    text = path.read_text(encoding="utf-8")
    measured, found = read_measured(text), _LINE.search(text)
    if measured is None or found is None:
        raise SystemExit(f"{path}: it has no line of the form `Measures ...`. Measure again.")
    first, _, later = found[0][:-1].partition("; code ")
    changes = " after accepted changes, the last one" if later else ""
    line = f"{first}; code {digest(measured.paths)}{changes}: {reason.rstrip('.')}."
    path.write_text(text.replace(found[0], line), encoding="utf-8")


def rename(text: str, old: str, new: str) -> str:
    """Returns the text of a result in which a file that has moved has its new name, as a path and as a module."""
    names = {old: new, _module(old): _module(new)}
    for before, after in names.items():
        text = re.sub(rf"(?<=[` ]){re.escape(before)}(?=[` ])", after, text)
    return text


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def main() -> int:
    """Lists stale results, accepts changes, or renames files in results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="Markdown files; without any, all results")
    parser.add_argument("--accept", metavar="REASON", help="why the figures stand although the code has changed")
    parser.add_argument("--moved", nargs=2, metavar=("OLD", "NEW"), help="paths of a file before and after its move")
    arguments = parser.parse_args()
    if arguments.moved:
        for path in sorted(RESULTS.glob("*.md")):
            path.write_text(rename(path.read_text(encoding="utf-8"), *arguments.moved), encoding="utf-8")
        return 0
    if arguments.accept and not arguments.results:
        parser.error("--accept needs the results whose figures stand")
    for path in arguments.results:
        if not path.is_file():
            parser.error(f"{path}: there is no such file; results are in {RESULTS.relative_to(REPOSITORY)}")
    num_stale = 0
    for path in arguments.results or sorted(RESULTS.glob("*.md")):
        measured = read_measured(path.read_text(encoding="utf-8"))
        if measured is None:
            print(f"{path.name}: does not say what it measures")
        elif is_stale(measured) and arguments.accept:
            accept(path, arguments.accept)
        elif is_stale(measured):
            num_stale += 1
            print(f"{path.name}: stale, code {digest(measured.paths)} of {', '.join(measured.paths)}")
    return int(num_stale > 0)


if __name__ == "__main__":
    sys.exit(main())
