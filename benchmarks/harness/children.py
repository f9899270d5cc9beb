"""Other processes of a benchmark: a peer such as NeMo, a child of the benchmark itself, or a command of the project.

If a process fails, the benchmark ends with one line: the exit code, and the last line of its standard error.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import IO, Any

from benchmarks.harness.repository import REPOSITORY

PEERS = REPOSITORY / "benchmarks" / "peers"
"""Scripts that run in environments of other projects."""

BIN = Path(sys.executable).parent


def run_peer(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    echo: bool = False,
) -> str:
    """Runs a command to its end.

    Args:
        command: The program and its arguments.
        cwd: Working directory; by default the one of this process.
        env: Environment; by default the one of this process.
        echo: Whether the command's output and errors are passed on while it runs. Without it, both are captured.

    Returns:
        The standard output of the command; empty with `echo`.

    Raises:
        SystemExit: The command cannot be started, or its exit code is not 0.
    """
    name = " ".join(Path(part).name for part in command[:2])
    stdout = None if echo else subprocess.PIPE
    try:
        peer = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except OSError as error:
        raise SystemExit(f"{name}: cannot be started ({error.strerror}: {error.filename}).") from error
    with peer:
        assert peer.stderr is not None
        last_lines = [""]
        reader = Thread(target=_read_errors, args=(peer.stderr, last_lines, echo))
        reader.start()
        output = peer.stdout.read() if peer.stdout is not None else ""
        reader.join()
    if peer.returncode != 0:
        raise SystemExit(f"{name}: exit code {peer.returncode}: {last_lines[0] or 'no message on standard error'}")
    return output


def _read_errors(stream: IO[str], last_lines: list[str], echo: bool) -> None:
    """Keeps the last non-empty line of a stream in `last_lines`, and passes the lines on if `echo` is set."""
    for line in stream:
        if echo:
            sys.stderr.write(line)
            sys.stderr.flush()
        if line.strip():
            last_lines[0] = line.strip()


def run_command(command: str, cwd: Path | None = None, *, echo: bool = False) -> None:
    """Prints a command of the project, as a user could type it, and runs it with one thread a process.

    Args:
        command: The program and its arguments.
        cwd: Working directory; by default the one of this process.
        echo: Whether its output is passed on.
    """
    print("$", command, flush=True)
    # Commands and modules of this Python and of this repository are found first.
    path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": search_path()}
    run_peer(shlex.split(command), cwd=cwd, env={**os.environ, **path, "OMP_NUM_THREADS": "1"}, echo=echo)


def search_path() -> str:
    """Returns the search path of modules, with this repository first."""
    return os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


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
        variables: Further environment variables.
    """
    return json.loads(run_peer(command, env={**os.environ, **variables}).splitlines()[-1])
