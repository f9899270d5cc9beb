"""docs/tour.md shows lines of the sources as they are."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TOUR = (REPOSITORY / "docs" / "tour.md").read_text(encoding="utf-8")
STOPS = re.split(r"^## ", TOUR, flags=re.MULTILINE)[1:]


def stripped(lines: str) -> list[str]:
    return [line.strip() for line in lines.splitlines() if line.strip()]


def sources_of(stop: str) -> list[Path]:
    """Returns the files that a stop names before its first excerpt or promise."""
    found: list[Path] = []
    for name in re.findall(r"`([\w/]+\.py)`", stop.split("```")[0].split("**Promise**")[0]):
        path = REPOSITORY / name if "/" in name else found[-1].with_name(name)
        found.append(path)
    return found


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.splitlines()[0])
def test_files_exist_and_excerpts_are_lines_of_one_of_them(stop: str) -> None:
    sources = sources_of(stop)
    assert all(path.is_file() for path in sources)
    code = ["\n".join(stripped(path.read_text(encoding="utf-8"))) for path in sources]
    for excerpt in re.findall(r"```python\n(.*?)```", stop, re.DOTALL):
        for part in re.split(r"^ *\.\.\.\n", excerpt, flags=re.MULTILINE):
            assert any("\n".join(stripped(part)) in text for text in code), part


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[\w/.]*)`", TOUR))))
def test_the_tests_that_it_names_exist(name: str) -> None:
    assert (REPOSITORY / name).exists()
