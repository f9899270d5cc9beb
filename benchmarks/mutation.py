"""Changes the code in one place at a time, and lists the changes that its tests do not notice.

    python benchmarks/mutation.py OUTPUT [--mutants 250] [--seed 0] [--minutes 60] [--results mutation.md]

Needs cosmic-ray (`pip install cosmic-ray`): its operators find the places and make the changes. One more operator
removes calls whose result is not used. Places are drawn from each part of the code in proportion to their number, and
one change in each place. The tests of the part run on a copy of the repository until one fails, in a process that is
forked from this one, which has imported torch. OUTPUT keeps what was found, so the same command continues.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from difflib import unified_diff
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from kept_settings import keep_settings
from measured import REPOSITORY, digest, measured_line
from parso.python.tree import Keyword
from peer import run_peer

PARTS = {
    "plan": ("nestdata/plan", ["tests/nestdata/plan", "tests/cli/test_plan.py"]),
    "batch": ("nestdata/batch", ["tests/nestdata/batch"]),
    "nn": ("nestmodel/nn", ["tests/nestmodel/nn", "tests/golden"]),
    "training": ("nestmodel/training", ["tests/nestmodel/training"]),
    "output": ("nestdata/output.py", ["tests/nestdata/test_output.py"]),
}
"""The code of each part, and its tests."""

BAR = r"\|"
"""A bar in a cell of a table in Markdown."""

SHORT = "not slow and not multiprocess and not faults and not network and not remote and not slurm"
"""The tests that are run: those of a whole part take less than a minute."""

PICTURES = ("preview.py", "curves.py")
"""Files that draw pictures, whose look no test can judge."""

IN_ANNOTATIONS = "BitOr"
"""Operators on `|` are left out: in an annotation, their changes fail as soon as the module is imported."""


class RemoveCall:
    """An operator of cosmic-ray: a call whose result is not used becomes `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yields where a node can be changed."""
        is_statement = node.parent is not None and node.parent.type == "simple_stmt"
        if is_statement and node.type == "atom_expr" and node.children[-1].get_first_leaf().value == "(":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, _index: int) -> Any:
        """Returns what takes the place of a node."""
        return Keyword("pass", node.start_pos, node.get_first_leaf().prefix)


OPERATORS: dict[str, Any] = {
    name: get_operator(name)()
    for name in operator_names()
    if IN_ANNOTATIONS not in name and not get_operator(name).arguments()
} | {"RemoveCall": RemoveCall()}


class Mutant(NamedTuple):
    """One change of one file."""

    part: str
    path: str
    operator: str
    occurrence: int
    line: int
    column: int

    def code(self) -> str:
        """Returns the changed file."""
        changed: str = mutate_code((REPOSITORY / self.path).read_text(), OPERATORS[self.operator], self.occurrence)
        return changed

    def is_python(self) -> bool:
        """Whether the changed file can be compiled; the `*` of a signature, for instance, can become `%`."""
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(self.code(), self.path, "exec")
        except SyntaxError:
            return False
        return True

    def change(self) -> str:
        """Returns the first line that goes, and the one that comes."""
        before = (REPOSITORY / self.path).read_text().splitlines()
        lines = list(unified_diff(before, self.code().splitlines(), lineterm="", n=0))[3:]
        old, new = (next((line[1:].strip() for line in lines if line[0] == sign), "") for sign in "-+")
        return " | ".join(f"`{line.replace('|', BAR)}`" for line in (old, new))


def main() -> int:
    """Tries the mutants that are missing, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--mutants", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10_000.0, help="no mutant is begun after this time")
    parser.add_argument("--results", type=Path, default=Path("mutation.md"), help="Markdown file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    places = {part: find_places(part) for part in PARTS}
    drawn = draw(places, arguments.mutants, random.Random(arguments.seed))
    arguments.output.mkdir(parents=True, exist_ok=True)
    keep_settings(arguments.output, {"code": digest([code for code, _ in PARTS.values()])})
    kept = arguments.output / "outcomes.jsonl"
    kept.touch()
    outcomes = {Mutant(*line[:-1]): line[-1] for line in map(json.loads, kept.read_text().splitlines())}
    end = time.monotonic() + 60 * arguments.minutes
    copy = copy_repository(arguments.output / "repository")
    limits: dict[str, float] = {}
    for mutant in drawn:
        if mutant in outcomes or time.monotonic() > end:
            continue
        if mutant.part not in limits:
            limits[mutant.part] = 20 + 3 * seconds_of_tests(copy, mutant.part)
        outcomes[mutant] = try_mutant(copy, mutant, limits[mutant.part])
        with kept.open("a") as file:
            file.write(json.dumps([*mutant, outcomes[mutant]]) + "\n")
        print(f"{mutant.path}:{mutant.line} {outcomes[mutant]}", flush=True)
    arguments.results.write_text(report(places, drawn, outcomes, arguments.seed))
    return 0


def find_places(part: str) -> dict[tuple[str, int, int], list[Mutant]]:
    """Returns all changes of a part, by file, line and column."""
    code = REPOSITORY / PARTS[part][0]
    places = defaultdict(list)
    for path in sorted(code.rglob("*.py")) if code.is_dir() else [code]:
        if path.name in PICTURES:
            continue
        name = str(path.relative_to(REPOSITORY))
        nodes = list(ast_nodes(get_ast(path.read_text())))
        for operator in OPERATORS:
            positions = (start for node in nodes for start, _ in OPERATORS[operator].mutation_positions(node))
            for occurrence, (line, column) in enumerate(positions):
                places[name, line, column].append(Mutant(part, name, operator, occurrence, line, column))
    return dict(places)


def draw(places: dict[str, dict[Any, list[Mutant]]], number: int, generator: random.Random) -> list[Mutant]:
    """Draws places of each part, and one change in each; those that are not Python are left out."""
    total = sum(map(len, places.values()))
    drawn = [
        generator.choice(found[place])
        for found in places.values()
        for place in generator.sample(sorted(found), round(number * len(found) / total))
    ]
    generator.shuffle(drawn)
    return [mutant for mutant in drawn if mutant.is_python()]


def copy_repository(copy: Path) -> Path:
    """Copies the files that git knows."""
    names = run_peer(["git", "ls-files", "-z"], cwd=REPOSITORY)
    for name in names.split("\0")[:-1]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    return copy


def seconds_of_tests(copy: Path, part: str) -> float:
    """Returns how long the tests of a part take, all of which must pass."""
    started = time.monotonic()
    outcome = run_tests(copy, PARTS[part][1], 1200.0)
    if outcome != "survived":
        raise SystemExit(f"{part}: the tests fail without a change. See {copy.parent / 'tests.log'}.")
    return time.monotonic() - started


def try_mutant(copy: Path, mutant: Mutant, limit_s: float) -> str:
    """Returns "killed", "timed out" or "survived". The tests of the changed module run first."""
    tests = PARTS[mutant.part][1]
    own = [
        str(path.relative_to(copy))
        for test in tests
        for path in (copy / test).rglob(f"test_{Path(mutant.path).stem}.py")
    ]
    original = (copy / mutant.path).read_text()
    (copy / mutant.path).write_text(mutant.code())
    try:
        return run_tests(copy, [*own, *tests], limit_s)
    finally:
        (copy / mutant.path).write_text(original)


def run_tests(copy: Path, tests: list[str], limit_s: float) -> str:
    """Runs tests in a forked process until one fails."""
    child = os.fork()
    if not child:
        os.setsid()
        log = os.open(copy.parent / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}  # for processes that tests start
        sys.path.insert(0, str(copy))
        sys.dont_write_bytecode = True
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", SHORT, *tests])))
    deadline = time.monotonic() + limit_s
    done, status = 0, 0
    while not done and time.monotonic() < deadline:
        time.sleep(0.05)
        done, status = os.waitpid(child, os.WNOHANG)
    try:
        os.killpg(child, signal.SIGKILL)  # also what a test left behind
    except ProcessLookupError:
        pass
    if not done:
        os.waitpid(child, 0)
        return "timed out"
    code = os.waitstatus_to_exitcode(status)
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest ran no test. See {copy.parent / 'tests.log'}.")
    return "killed" if code else "survived"


def report(
    places: dict[str, dict[Any, list[Mutant]]], drawn: list[Mutant], outcomes: dict[Mutant, str], seed: int
) -> str:
    """Returns the results as Markdown."""
    tried = [mutant for mutant in drawn if mutant in outcomes]
    lines = [
        "# Changes of the code that tests do not notice",
        "",
        f"Made by `benchmarks/mutation.py`, once, on {os.cpu_count()} CPU cores, with cosmic-ray",
        f"{version('cosmic-ray')}: {len(tried)} of {len(drawn)} changes, drawn with seed {seed}. A change is killed",
        "if a test of its part fails, and has timed out after three times the time of these tests and 20 s. Tests that",
        "start processes or take more than five seconds are not run here.",
        "",
        measured_line("benchmarks/mutation.py", *(code for code, _ in PARTS.values())),
        "",
        "| part | tests | places | tried | killed | timed out | survived |",
        "|---|---|---|---|---|---|---|",
    ]
    for part, (code, tests) in PARTS.items():
        found = Counter(outcomes[mutant] for mutant in tried if mutant.part == part)
        cells = [found.total(), *(found[outcome] for outcome in ("killed", "timed out", "survived"))]
        names = ", ".join(f"`{test}`" for test in tests)
        lines.append(f"| `{code}` | {names} | {len(places[part])} | {' | '.join(map(str, cells))} |")
    lines += ["", "## Changes that survived", "", "| place | was | is |", "|---|---|---|"]
    for mutant in sorted(mutant for mutant in tried if outcomes[mutant] == "survived"):
        lines.append(f"| `{mutant.path}:{mutant.line}` | {mutant.change()} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
