"""Starts the ranks of a training run as processes, and reads the files that they write."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from nestmodel.training.ranks import STARTER
from nestmodel.training.saving.checkpoint_files import find_checkpoints
from tests.conftest import MessyCorpora
from tests.network.nodes import IPV4, Node
from tests.ports import free_port
from tests.training import messy_data

MICROBATCHES_PER_STEP = 4
REPOSITORY = Path(__file__).parents[2]


@dataclass(kw_only=True)
class Run:
    """A run in a directory. When started again, it resumes from its newest checkpoint."""

    corpora: MessyCorpora
    directory: Path
    max_steps: int
    world_size: int = 1
    num_workers: int = 0
    start_method: str = "forkserver"
    """Start method of loader workers. A worker that is forked from a rank with gloo's threads may deadlock."""

    remote: dict[str, Any] = field(default_factory=dict)
    """Fields of `RemoteConfig` for audio in object stores."""

    every_n_steps: int = 1
    limits: dict[str, float] | None = None
    """Limits of the stall guard; None turns it off."""

    hosts: Sequence[Node] = ()
    """A machine for each rank; the first one is at MASTER_ADDR."""

    blind_rank: int | None = None
    """A rank that starts without looking for a checkpoint."""

    proportional_steps: bool = False
    """Trains with `ProportionalSteps`, for a comparison with a run that sums in a different order."""

    has_device: bool = False
    """Gives every rank a stand-in for a GPU, which the stall guard observes."""

    max_minutes: float | None = None
    limit_val_batches: int = 0
    val_check_interval: int = 2
    patience_s: float = 20.0
    """Seconds that the other ranks have to exit after one has failed, before they are killed."""

    _ended_s: float = field(default=0.0, init=False)

    def start(
        self, *, faults: dict[int, tuple[str, int, int]] | None = None, world_size: int | None = None
    ) -> list[int]:
        """Runs all ranks until they exit, or for `patience_s` after one has failed; returns their exit codes.

        Args:
            faults: (kind, step, microbatch) of a fault, by rank.
            world_size: Number of ranks; by default that of the run.
        """
        world_size = world_size or self.world_size
        self._write_settings(faults)
        shared = {name: value for name, value in os.environ.items() if name != STARTER}
        shared |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(free_port()), "FAULT_TIME_FILE": str(self.directory / "fault-time")}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                command = [sys.executable, "-m", "tests.distributed.training_run", str(self.directory / "run.json")]
                environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                if self.hosts:
                    command = self.hosts[rank].command(*command)
                    environment |= {"LOCAL_RANK": "0", "NODE_RANK": str(rank), "MASTER_ADDR": IPV4[0]}
                with (self.directory / f"rank-{rank}.log").open("a") as log:
                    processes.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log))
            codes = _wait(processes, self.patience_s)
            self._ended_s = time.monotonic()
            return codes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def start_by_torchrun(self, faults: dict[int, tuple[str, int, int]]) -> tuple[list[int], str]:
        """Runs all ranks under one torchrun per host, which restarts them at most once.

        Returns:
            The exit code of torchrun on each host, and the output of all hosts.
        """
        self._write_settings(faults)
        num_hosts = len(self.hosts) or 1
        rendezvous = f"{self.hosts[0].name if self.hosts else '127.0.0.1'}:{free_port()}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_hosts), "--max-restarts", "1"]
        command += ["--nproc-per-node", str(self.world_size // num_hosts), "--monitor-interval", "0.2"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment["FAULT_TIME_FILE"] = str(self.directory / "fault-time")
        processes = []
        for number in range(num_hosts):
            run = [*command, "-m", "tests.distributed.training_run", str(self.directory / "run.json")]
            run = self.hosts[number].command(*run) if self.hosts else run
            with (self.directory / f"host-{number}.log").open("w") as log:
                processes.append(subprocess.Popen(run, cwd=REPOSITORY, env=environment, stdout=log, stderr=log))
        try:
            codes = [process.wait(timeout=200) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return codes, "".join((self.directory / f"host-{i}.log").read_text() for i in range(num_hosts))

    def _write_settings(self, faults: dict[int, tuple[str, int, int]] | None) -> None:
        self.directory.mkdir(exist_ok=True)
        elsewhere = ("corpora", "directory", "hosts")
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in elsewhere}
        settings |= {
            "speech": str(self.corpora.speech),
            "noise": str(self.corpora.noise),
            "directory": str(self.directory),
            "faults": [{"rank": rank, "what": list(what)} for rank, what in (faults or {}).items()],
            "num_nodes": len(self.hosts) or 1,
        }
        (self.directory / "run.json").write_text(json.dumps(settings))

    def seconds_from_fault_to_end(self) -> float:
        """Returns the seconds from the fault to the exit of the last rank."""
        path = self.directory / "fault-time"
        assert path.exists(), "the run ended before the fault:\n" + "".join(map(self.log, range(self.world_size)))
        return self._ended_s - float(path.read_text())

    def log(self, rank: int) -> str:
        return (self.directory / f"rank-{rank}.log").read_text()

    def seen(self) -> dict[tuple[int, int], list[str]]:
        """Returns the cut ids of every (step, microbatch), as last seen."""
        lines = [line for line in self._lines() if "ids" in line]
        return {(line["step"], line["microbatch"]): line["ids"] for line in lines}

    def replaced(self) -> list[tuple[str, str]]:
        """Returns (cut id, reason) of the cuts that could not be read, in the order of the batches."""
        batches = {(line["step"], line["microbatch"]): line["replaced"] for line in self._lines() if "ids" in line}
        return [(cut_id, reason) for index in sorted(batches) for cut_id, reason in batches[index]]

    def planned(self, step: int, microbatch: int) -> list[str]:
        """Returns the cut ids that the plan assigns to a microbatch, even if no rank reached it."""
        dataset = messy_data(self.corpora, microbatches_per_step=MICROBATCHES_PER_STEP).train_dataset
        return [dataset.corpus.line(int(row))["id"] for row in dataset.plan.indices(step, microbatch)]

    def losses(self) -> dict[int, float]:
        """Returns the loss by the number of optimizer steps made."""
        return {step: logged["train_loss"] for step, logged in self.logged().items()}

    def logged(self) -> dict[int, dict[str, float]]:
        """Returns the logged metrics by the number of optimizer steps made."""
        return {line["made"]: line["logged"] for line in self._lines() if "made" in line}

    def validations(self) -> dict[int, float]:
        """Returns the loss of every validation by the number of optimizer steps made."""
        return {line["validated"]: line["loss"] for line in self._lines() if "validated" in line}

    def checkpoint(self) -> dict[str, Any]:
        """Returns the contents of the newest checkpoint."""
        found: dict[str, Any] = torch.load(self.steps()[0].path, map_location="cpu", weights_only=False)
        return found

    def state(self) -> Any:
        """Returns the state of the newest checkpoint; see `state_of`."""
        return state_of(self.steps()[0].path)

    def steps(self) -> list[Any]:
        return find_checkpoints(self.directory / "checkpoints")

    def _lines(self) -> list[dict[str, Any]]:
        files = sorted(self.directory.glob("seen-*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def comparable(value: Any) -> Any:
    """Returns a value that compares bit for bit: tensors become their bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: comparable(inner) for key, inner in value.items()}
    return [comparable(inner) for inner in value] if isinstance(value, list | tuple) else value


def state_of(path: Path) -> Any:
    """Returns step, weights, optimizer and schedule of a checkpoint, which compare bit for bit."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    return comparable([checkpoint[name] for name in ("global_step", "state_dict", "optimizer_states", "lr_schedulers")])


def monitors() -> dict[int, str]:
    """Returns the command lines of all monitors that run on this machine, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text(errors="replace")
            if "\0nestguard\0" in words:
                found[int(path.parent.name)] = words
    return found


def _wait(processes: list["subprocess.Popen[bytes]"], patience_s: float) -> list[int]:
    """Returns the exit codes. After a rank has failed, the others have `patience_s` to exit."""
    left = list(processes)
    while left:
        try:
            code = left[0].wait(timeout=0.2)
            left.pop(0)
            failed = code != 0
        except subprocess.TimeoutExpired:
            failed = any(process.poll() not in (None, 0) for process in left)
        if failed:
            for process in left:
                try:
                    process.wait(timeout=patience_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            break
    return [process.wait() for process in processes]


LIMITS = {"step_s": 8.0, "first_step_s": 60.0, "validation_s": 30.0, "checkpoint_s": 30.0}
END_PATIENCE_S = 40.0
"""Time that a busy machine may need to collect stacks, write the report and end; less than the limits it rules out."""


def left_running(run: Run) -> list[str]:
    """Returns the command lines of processes that have the directory of the run in it or in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words, environment = (path.with_name(name).read_bytes().decode() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if str(run.directory) in words + environment and int(path.parent.name) != os.getpid():
            found.append(words.replace("\0", " "))
    return found


def gone_soon(run: Run) -> bool:
    end = time.monotonic() + END_PATIENCE_S
    while left_running(run) and time.monotonic() < end:
        time.sleep(0.1)
    return not left_running(run)
