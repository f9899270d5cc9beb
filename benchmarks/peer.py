"""Runs another process of a benchmark: a peer such as NeMo, a child of the script itself, or a command of the project.

If the process fails, the benchmark ends with one line: the exit code, and the last line of its standard error.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import IO


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
        cwd: Working directory; by default that of this process.
        env: Environment; by default that of this process.
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
