"""Root of the repository, and the line of a result that names the commit that was measured."""

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def commit() -> str:
    """Returns the commit that is checked out, with `with changes` behind it if files have changed since."""
    changed = " with changes" if _git("status", "--porcelain") else ""
    return _git("rev-parse", "--short", "HEAD") + changed


def commit_line() -> str:
    """Returns the sentence of a result that names the measured commit and its date."""
    return f"Measured at commit {commit()}, {_git('show', '-s', '--format=%cs')}."


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()
