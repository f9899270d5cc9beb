"""Runs the installed commands in separate processes, as a user does."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run(command: str, *arguments: object, cwd: Path, timeout_s: float = 400) -> Outcome:
    """Runs `nestdata` or `nestmodel`, which are installed in the same environment as this Python."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [str(Path(sys.executable).parent / command), *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the one line about an error that a command has printed."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def mistake_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Returns all that a command has printed about a mistake: the explanation of tyro, if any, and the line below."""
    shown = capsys.readouterr().err
    (line,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert shown.endswith(f"{line}\n")
    return shown
