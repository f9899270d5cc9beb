"""Checks the Dockerfile with hadolint, and builds it where docker or buildah can."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCKERFILE = REPOSITORY / "Dockerfile"
IMAGE = "nest-pretrain-test"


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    found = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_default_extras_exist() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Builds the image; runs a command in a container of it, as its own or as another user."""
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        build, start = ["docker", "build"], ["docker", "run", "--rm", "--network", "none"]
    elif shutil.which("buildah"):
        build, start = ["buildah", "build"], ["buildah", "run"]
    else:
        pytest.skip("neither docker with a daemon nor buildah is here")
    subprocess.run([*build, "--tag", IMAGE, REPOSITORY], check=True)
    container = IMAGE
    if build[0] == "buildah":
        made = subprocess.run(["buildah", "from", IMAGE], capture_output=True, text=True, check=True)
        container = made.stdout.strip()

    def run(*command: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
        options = ["--user", user] if user else []
        return subprocess.run([*start, *options, container, *command], capture_output=True, text=True)

    yield run
    if build[0] == "buildah":
        subprocess.run(["buildah", "rm", container], check=True)


@pytest.mark.container
@pytest.mark.timeout(3600)
def test_the_image_runs_the_commands_as_an_ordinary_user(run: Run) -> None:
    assert run("id", "--user").stdout == "1000\n"
    for command in ("nestdata", "nestmodel"):
        done = run(command, "--version")
        assert done.returncode == 0, done.stderr


@pytest.mark.container
def test_a_user_that_the_image_does_not_know_has_a_home(run: Run) -> None:
    script = "import getpass, pathlib, nestmodel; pathlib.Path.home().joinpath('x').touch(); print(getpass.getuser())"
    done = run("python", "-c", script, user="12345")
    assert (done.returncode, done.stdout) == (0, "nest\n"), done.stderr
