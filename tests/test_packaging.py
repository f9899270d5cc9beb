"""Checks the contents of the wheel, and the declared and pinned versions of dependencies."""

import io
import re
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.conftest import NUMERICS, SERIAL_TESTS
from tests.release import changelog_problem, repack

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
FOLDERS = {"nestcli": "cli", "nestdata": "nestdata", "nestguard": "nestguard", "nestmodel": "nestmodel"}


def test_the_tests_that_conftest_names_exist() -> None:
    assert [path for path in (*NUMERICS, *SERIAL_TESTS) if not (REPOSITORY / path).exists()] == []


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


def test_a_source_archive_does_not_depend_on_when_and_where_it_was_built(tmp_path: Path) -> None:
    archives = []
    for time, names in ((100, ("a.txt", "b.txt")), (200, ("b.txt", "a.txt"))):
        path = tmp_path / f"{time}.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name in names:
                member = tarfile.TarInfo(f"package/{name}")
                member.size, member.mtime, member.uid, member.mode = 1, time, time, 0o600 + time % 8
                tar.addfile(member, io.BytesIO(name[:1].encode()))
        repack(path, tmp_path / f"{time}.new.tar.gz", 50)
        archives.append((tmp_path / f"{time}.new.tar.gz").read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(fileobj=io.BytesIO(archives[0])) as tar:
        read = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    assert read == {"package/a.txt": b"a", "package/b.txt": b"b"}


def test_a_release_has_a_dated_section_of_the_changelog() -> None:
    assert changelog_problem("# Changelog\n\n## 0.2.0 (2026-12-01)\n\n## 0.1.0 (2026-11-24)\n", "0.2.0") is None
    problem = changelog_problem("# Changelog\n\n## Unreleased\n\n## 0.1.0 (2026-11-24)\n", "0.1.0")
    assert problem == "CHANGELOG.md starts with the section 'Unreleased': expected '0.1.0 (YYYY-MM-DD)'."
