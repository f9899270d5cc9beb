"""Starts a run on two nodes, as docs/many-gpus.md tells, and reads what it leaves."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nestmodel.training.ranks import STARTER
from nestmodel.training.saving.checkpoint_files import find_checkpoints
from tests.conftest import MessyCorpora
from tests.distributed.runs import state_of
from tests.network.nodes import NAMES, Network, Node
from tests.training import TINY

STEPS = 6
GATE_STEP = 3
RENDEZVOUS_PORT, GUARD_PORT = 29400, 29600
REPOSITORY = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent

# Longer than what a busy machine takes for a step. The silence is longer than an outage of 5 s, after which TCP sends
# again within 7 s.
LIMITS = {"first_step_s": 150, "step_s": 15, "node_silence_s": 15}

LONGEST_WAIT_S = 300


@dataclass
class Run:
    """A run of `torchrun` on each of two nodes, with a directory that they share."""

    directory: Path
    corpora: MessyCorpora
    network: Network
    endpoint: str = f"{NAMES[0]}:{RENDEZVOUS_PORT}"
    local_addresses: Sequence[str] = ()
    """The value of `--local-addr` on each node; none is given if empty."""

    environment: dict[str, str] | None = None
    limits: dict[str, int] = field(default_factory=lambda: LIMITS)
    max_restarts: int = 10
    join_timeout_s: int = 60
    """How long torchrun waits for the other node."""

    def start(self) -> list["subprocess.Popen[bytes]"]:
        """Starts torchrun on both nodes."""
        self.directory.mkdir(exist_ok=True)
        checkpoints = {"every_n_steps": 1, "keep": 100, "directory": str(self.directory / "run" / "checkpoints")}
        pause = {"directory": str(self.directory), "step": GATE_STEP}
        callbacks = [{"class_path": "tests.distributed.pause.Pause", "init_args": pause}]
        settings = {**TINY, "trainer": {**TINY["trainer"], "max_steps": STEPS, "callbacks": callbacks}}
        settings["checkpoints"] = checkpoints
        settings["guard"] = {"limits": self.limits, "port": GUARD_PORT}
        (self.directory / "tiny.yaml").write_text(yaml.safe_dump(settings))
        fit = [str(PROGRAMS / "nestmodel"), "fit", "--config", "demo", "--config", "tiny.yaml"]
        fit += [str(self.corpora.speech), "--accelerator", "cpu", "--trainer.strategy", "ddp"]
        fit += ["--num-nodes", "2", "--devices", "1", "--output", "run", "--ckpt-path", "last"]
        launch = [str(PROGRAMS / "torchrun"), "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        launch += ["--rdzv-endpoint", self.endpoint, "--rdzv-conf", f"join_timeout={self.join_timeout_s}"]
        environment = {name: value for name, value in os.environ.items() if name not in (STARTER, "LOCAL_RANK")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(self.environment or {})}
        processes = []
        for i, node in enumerate(self.network.nodes):
            local = ["--local-addr", self.local_addresses[i]] if self.local_addresses else []
            command = node.command(*launch, *local, "--max-restarts", str(self.max_restarts), "--no-python", *fit)
            with self._log_of(node).open("a") as log:
                processes.append(subprocess.Popen(command, cwd=self.directory, env=environment, stdout=log, stderr=log))
        return processes

    def finish(self, processes: Sequence["subprocess.Popen[bytes]"]) -> list[int]:
        """Waits until torchrun has ended on both nodes and has left no process; returns the exit codes."""
        try:
            wait_for(lambda: all(process.poll() is not None for process in processes), self.output)
            wait_for(lambda: not any(node.pids() for node in self.network.nodes), self.output)
            return [process.wait() for process in processes]
        finally:
            for node in self.network.nodes:
                node.kill_all()
            for process in processes:
                process.wait()

    def wait_at_gate(self) -> None:
        """Waits until both ranks have made `GATE_STEP` steps and the stall guards of the nodes are connected."""
        wait_for(lambda: all((self.directory / f"reached-{rank}").exists() for rank in (0, 1)), self.output)
        wait_for(self._guards_talk, self.output)

    def open_gate(self) -> None:
        (self.directory / "go").touch()

    def _guards_talk(self) -> bool:
        """Returns whether node 0 has received messages beyond the ones that authenticate the other node."""
        command = self.network.nodes[0].command("ss", "-tinH", "sport", "=", f":{GUARD_PORT}")
        found = subprocess.run(command, capture_output=True, text=True).stdout
        return any(int(number) >= 5 for number in re.findall(r"data_segs_in:(\d+)", found))

    def _log_of(self, node: Node) -> Path:
        return self.directory / f"{node.name}.log"

    def outputs(self) -> list[str]:
        """Returns the output of each node."""
        return [self._log_of(node).read_text() for node in self.network.nodes]

    def output(self) -> str:
        return "\n".join(self.outputs())

    def tables(self) -> list[str]:
        """Returns the tables that the stall guards have written."""
        return [path.read_text() for path in (self.directory / "run" / "stalls").glob("*/table.txt")]

    def last_step(self) -> int:
        return find_checkpoints(self.directory / "run" / "checkpoints")[0].step

    def state(self) -> Any:
        """Returns what training has computed, for comparison bit for bit."""
        return state_of(find_checkpoints(self.directory / "run" / "checkpoints")[0].path)


def wait_for(is_reached: Callable[[], bool], describe: Callable[[], str]) -> None:
    end_s = time.monotonic() + LONGEST_WAIT_S
    while not is_reached():
        assert time.monotonic() < end_s, describe()
        time.sleep(0.1)
