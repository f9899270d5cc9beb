"""Section `stalls`: a kernel and a collective that hang in a run of their own, and what the stall guard reports."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Row, Section
from nestguard import EXIT_STALLED

REPOSITORY = Path(__file__).parents[2]
_LAUNCHER_VARIABLES = re.compile(
    r"(TORCHELASTIC_|SLURM_|PMI)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_|NODE_RANK"
)
_START_S = 240.0
"""Longest time for the start of a run, its first steps, and the end of its processes."""


def measure_stalls(context: Context, section: Section) -> None:
    """Adds a row for a kernel that hangs on the only rank, and for a rank that never joins a collective.

    Only rank 0 starts the runs. The second one needs two GPUs; with one, it runs on the CPU with gloo.
    """
    if context.rank == 0:
        has_two = context.is_cuda and torch.cuda.device_count() > 1
        for kind, num_ranks, is_on_gpu in (("kernel", 1, context.is_cuda), ("collective", 2, has_two)):
            device = "cuda" if is_on_gpu else "cpu"
            if not section.has(_name(kind, num_ranks, device)):
                section.add(stall(context, kind, num_ranks, device))
        section.notes.append(
            f"The limit for a phase is {context.extent.stall_seconds:g} s. `exit code` {EXIT_STALLED} is that of the "
            "stall guard. `phase` and `reason` are those of the culprit in its report."
        )


def stall(context: Context, kind: str, num_ranks: int, device: str) -> Row:
    """Starts a run that hangs, waits for its end, and returns the row of its report."""
    directory = context.directory / f"stall-{kind}"
    directory.mkdir()
    command = [sys.executable, "-m", "benchmarks.gpu.stalled", kind, device, str(num_ranks)]
    command += [str(context.extent.stall_seconds), str(directory), str(context.directory)]
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.match(name)}
    limit_s = _START_S + 4 * context.extent.stall_seconds
    with (directory / "log.txt").open("w") as log:
        started = time.monotonic()
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    row: Row = {"row": _name(kind, num_ranks, device), "exit code": code}
    return {**row, "seconds": time.monotonic() - started, **_said(directory)}


def _name(kind: str, num_ranks: int, device: str) -> str:
    return f"{kind}, {num_ranks} rank{'s' if num_ranks > 1 else ''}, {device}"


def _said(directory: Path) -> dict[str, Any]:
    """Returns what the report says about the culprits; the end of the log if there is no report."""
    paths = list[Path]()
    deadline_s = time.monotonic() + 10.0
    while not paths and time.monotonic() < deadline_s:  # the monitor may write after the rank has ended
        paths = sorted((directory / "run" / "stalls").glob("*/stall.json"))
        time.sleep(0.2)
    if not paths:
        return {"reason": f"no report; the log ends with: {(directory / 'log.txt').read_text()[-300:]}"}
    processes = json.loads(paths[0].read_text())["processes"]
    culprits = [one for one in processes if one.get("is_culprit")] or processes
    named = {
        key: ", ".join(dict.fromkeys(str(one.get(key)) for one in culprits))
        for key in ("name", "verdict", "phase", "reason")
    }
    return {"culprit": named.pop("name"), **named}
