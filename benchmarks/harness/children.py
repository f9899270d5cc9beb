"""Processes of a benchmark that return what they measured as JSON on the last line of their output."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measured import REPOSITORY
from benchmarks.peer import run_peer

PEERS = REPOSITORY / "benchmarks" / "peers"
"""Scripts that run in environments of other projects."""


def own_command(script: str, *arguments: object) -> list[str]:
    """Returns the command that runs a benchmark in a process of its own; the script is its `__file__`.

    The process finds the benchmark by its search path, which `python -m benchmarks run` sets.
    """
    module = Path(script).resolve().relative_to(REPOSITORY).with_suffix("")
    return [sys.executable, "-m", ".".join(module.parts), *map(str, arguments)]


def json_of(command: Sequence[str | Path], **variables: str) -> Any:
    """Returns the last line of a command's output, read as JSON.

    Args:
        command: The program and its arguments.
        variables: Environment variables beside those of this process.
    """
    return json.loads(run_peer(command, env={**os.environ, **variables}).splitlines()[-1])
