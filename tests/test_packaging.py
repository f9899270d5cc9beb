"""Checks the contents of the wheel, and the declared and pinned versions of dependencies."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
FOLDERS = {"nestcli": "cli", "nestdata": "nestdata", "nestguard": "nestguard", "nestmodel": "nestmodel"}


def pins(name: str) -> dict[str, str]:
    """Returns versions by normalised package name, from a file of `name==version` lines."""
    lines = (REPOSITORY / name).read_text().splitlines()
    rows = [line.partition("==") for line in lines if "==" in line and not line.startswith("#")]
    return {package.lower().replace("_", "-"): version for package, _, version in rows}


def requirements(*extras: str) -> list[Requirement]:
    optional = PROJECT["project"]["optional-dependencies"]
    return [
        Requirement(line) for line in sum((optional[extra] for extra in extras), PROJECT["project"]["dependencies"])
    ]


@pytest.mark.parametrize("path", sorted((REPOSITORY / ".github/workflows").iterdir()), ids=lambda path: path.name)
def test_workflows_may_only_read_and_name_actions_by_commit(path: Path) -> None:
    text = path.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    used = re.findall(r"uses: *(.*)", text)
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_every_directory_with_code_is_in_the_wheel() -> None:
    found = set()
    for package, folder in FOLDERS.items():
        for path in (REPOSITORY / folder).rglob("__init__.py"):
            found.add(".".join([package, *path.parent.relative_to(REPOSITORY / folder).parts]))
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_data_file_is_in_the_wheel() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for package, folder in FOLDERS.items():
        root = REPOSITORY / folder
        files = {path for path in root.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
        assert files == {path for pattern in data.get(package, []) for path in root.glob(pattern)}


def test_the_lowest_version_of_each_dependency_is_the_one_that_was_tested() -> None:
    lowest = pins("constraints-lowest.txt")
    for requirement in requirements("dask", "huggingface", "probe", "remote", "safetensors", "test"):
        bounds = [bound.version for bound in requirement.specifier if bound.operator == ">="]
        assert bounds, requirement
        assert Version(lowest[requirement.name.lower()]) == Version(bounds[0]), requirement


def test_the_pinned_versions_are_within_the_declared_ranges() -> None:
    pinned = pins("constraints.txt")
    for requirement in requirements(
        "browser", "dask", "export", "finetune", "huggingface", "probe", "remote", "safetensors", "test"
    ):
        if requirement.name != "nest-pretrain":
            assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement
