"""What a newcomer types and writes, right and wrong: each has its exit code and its decisive line."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.first_contact.check import attempt, defects
from tests.cli.first_contact.folder import make_folder
from tests.cli.first_contact.lines import LINES, PROGRAMS, Line
from tests.cli.first_contact.process import Commands, commands

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # together; each takes about a second


class Newcomer(NamedTuple):
    folder: Path
    commands: Commands


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    directory = tmp_path_factory.mktemp("newcomer").resolve()
    with commands(REPOSITORY, directory / "server", warm=True) as server:
        make_folder(directory / "folder", server)
        yield Newcomer(directory / "folder", server)


def test_there_are_84_lines_and_five_programs() -> None:
    assert len({line.command for line in LINES}) == len(LINES) == 84
    assert len(PROGRAMS) == 5


@pytest.mark.parametrize("line", [*LINES, *PROGRAMS], ids=lambda line: line.command)
def test_a_line_ends_with_its_code_and_says_what_it_has_to(line: Line, newcomer: Newcomer) -> None:
    found = attempt(line, newcomer.folder, newcomer.commands)
    assert defects(line, found) == [], f"\n{found.outcome.out}\n{found.outcome.err}"
