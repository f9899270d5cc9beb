"""Starts the ranks of a run as real processes for tests, and ends all of them afterwards."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestguard.observe.process import process_state, start_ticks

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 45.0
"""Time for an event that a test waits for: more than a busy machine needs, less than the limits that it rules out."""

TOKEN = "the token of the run"
LIMITS = {"step_s": 2.0, "first_step_s": 4.0, "node_silence_s": 20.0}
LONG_LIMITS = {"step_s": 20.0, "first_step_s": 20.0}
"""For runs in which nothing may be reported: a busy machine delays heartbeats by less than this."""


class Run:
    """A run whose ranks are separate processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._others: dict[int, int] = {}

    @property
    def output(self) -> str:
        """Text that all processes wrote to standard error."""
        return (self.directory / "stderr.txt").read_text()

    @property
    def reports(self) -> list[Path]:
        return sorted((self.directory / "reports").glob("stall-*"))

    def report(self) -> dict[str, Any]:
        """Returns the content of the only report."""
        (path,) = self.reports
        return json.loads((path / "stall.json").read_text())

    def diagnoses(self) -> dict[str, str]:
        return {
            f"{process['rank']}" + ("" if process["worker"] is None else f".{process['worker']}"): process["diagnosis"]
            for process in self.report()["processes"]
        }

    def stack(self, name: str) -> str:
        (path,) = self.reports
        return (path / f"{name}.stack.txt").read_text()

    def pid(self, name: str, seconds: float = PATIENCE_S) -> int:
        """Returns the pid that a process has written to NAME.pid."""
        path = self.directory / f"{name}.pid"
        wait_until(lambda: path.exists() and path.read_text() != "", seconds)
        pid = int(path.read_text())
        self._others.setdefault(pid, start_ticks(pid) or 0)
        return pid

    def exit_codes(self, seconds: float = PATIENCE_S) -> list[int]:
        deadline = time.monotonic() + seconds
        return [rank.wait(max(0.1, deadline - time.monotonic())) for rank in self.ranks]

    def has_ended(self, pid: int) -> bool:
        return process_state(pid, self._others[pid]).has_ended

    def wait_for_end_of(self, pid: int, seconds: float = PATIENCE_S) -> None:
        wait_until(lambda: self.has_ended(pid), seconds)

    def end(self) -> None:
        for path in self.directory.glob("*.pid"):
            if path.read_text():
                self.pid(path.stem)
        for rank in self.ranks:
            rank.kill()
            rank.wait(5)
        for pid in self._others:
            if not self.has_ended(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition not met within {seconds} s"
        time.sleep(0.05)


@contextmanager
def run(
    directory: Path,
    *,
    world_size: int = 2,
    nodes: int = 1,
    fault: str | None = None,
    faulty_rank: int = 0,
    steps: int = 100_000,
    step_s: float = 0.05,
    peers: dict[str, Any] | None = None,
    limits: dict[str, float] | None = None,
    error_files: bool = False,
    passes_token: bool = False,
    device: str | None = None,
    trace: dict[int, Any] | None = None,
    tokens: Sequence[str] = (),
) -> Iterator[Run]:
    """Starts a run; if a fault is given, it is injected into one rank in its third step.

    With `device`, the ranks run on a stand-in or on a GPU ("cuda"), and the fault is the phase whose kernel hangs.
    `trace` is what the flight recorder of each rank returns.

    The monitors have their token from the environment; with `passes_token`, from the ranks that start them. With
    `tokens`, each node has another one.
    """
    started = Run(directory)
    local_world_size = world_size // nodes
    with (directory / "stderr.txt").open("wb") as errors:
        for rank in range(world_size):
            identity = {
                "rank": rank,
                "local_rank": rank % local_world_size,
                "node_rank": rank // local_world_size,
                "world_size": world_size,
                "local_world_size": local_world_size,
                "host": f"host-{rank // local_world_size}",
            }
            options = {
                "directory": str(directory),
                "identity": identity,
                "limits": {**LIMITS, **(limits or {})},
                "fault": fault,
                "faulty_rank": faulty_rank,
                "steps": steps,
                "step_s": step_s,
                "peers": peers,
                "device": device,
                "trace": (trace or {}).get(rank, {}),
                "token": TOKEN if passes_token else None,
            }
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
            if not passes_token:
                environment["NESTGUARD_TOKEN"] = tokens[rank // local_world_size] if tokens else TOKEN
            if error_files:
                environment["TORCHELASTIC_ERROR_FILE"] = str(directory / f"error-{rank}.json")
            command = [sys.executable, "-m", "tests.nestguard.rank", json.dumps(options)]
            started.ranks.append(
                subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=errors, stderr=errors)
            )
    try:
        yield started
    finally:
        started.end()
