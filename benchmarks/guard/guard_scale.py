"""Load of the stall guard's monitor on node 0 of many nodes, and the time until it names a stuck rank.

    python -m benchmarks run guard_scale [--nodes 512] [--rounds 5] [--quick]

Prints Markdown. The monitor of node 0 is a real one; it also watches 8 ranks and 64 loader workers of its own. The
other nodes are simulated by three processes, with a real connection each. Every rank makes a step a second, and every
monitor sends what it observes once a second. Then one rank stops while it computes, and all others wait for it.
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import nestguard.connect.follower
from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import own_command
from benchmarks.harness.report import Report, machine
from benchmarks.harness.repository import REPOSITORY
from benchmarks.harness.rounds import run_rounds
from nestguard import Heartbeat, Identity, PeerConfig, Phase, Reading, StallLimits, start_monitor
from nestguard.connect.follower import Follower
from nestguard.connect.peers import SharedToken, StopDecision
from nestguard.observe.view import ProcessState, ProcessView

QUICK = ["--quick"]
NUM_RANKS, NUM_WORKERS = 8, 64
"""Processes of a node."""

NUM_SIMULATORS = 2
TICKS = 20
"""How often per second a simulating process sends for some of its nodes."""

LIMITS = StallLimits(step_s=20.0, first_step_s=20.0, node_silence_s=60.0)
START_S = 4.0
"""Time for the processes of a run to start; then all monitors connect at once."""

CONNECT_S, MEASURED_S = 6.0, 6.0
"""Time for the monitors to connect, and time during which the load is measured. Then one rank is stuck."""

MAX_DIAGNOSIS_S = 15.0
"""Largest time to wait for a diagnosis, after the limit."""

PHASES = (Phase.LOADING, Phase.FORWARD, Phase.BACKWARD, Phase.COLLECTIVE, Phase.OPTIMIZER)


def main() -> int:
    """Runs the measurement and prints the table, or plays one of its parts."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"rounds": 1, "nodes": 32})
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        part = Part(*arguments.part)
        (simulate_node_0 if part.first_node == 0 else simulate_nodes)(part)
        return 0
    variants = {f"{num_nodes} nodes": partial(measure, num_nodes) for num_nodes in (arguments.nodes, 2)}
    _print(arguments, run_rounds(variants, arguments.rounds, warm_up=0))
    return 0


class Part(NamedTuple):
    """What one process of the simulation does. Times are from CLOCK_MONOTONIC, which processes share."""

    directory: str
    port: int
    num_nodes: int
    first_node: int
    end_node: int
    begins_at: float
    """Time at which the monitors connect and steps begin."""

    @property
    def stuck_at(self) -> float:
        """Time at which a rank of the last node gets stuck."""
        return self.begins_at + CONNECT_S + MEASURED_S

    @property
    def ends_at(self) -> float:
        """Latest time at which the simulation ends."""
        return self.stuck_at + LIMITS.step_s + MAX_DIAGNOSIS_S


class Result(NamedTuple):
    """Result of one run."""

    load_percent: float
    """CPU seconds of the monitor of node 0 in 100 s, while all ranks make steps."""

    connected_s: float
    """Time until all nodes were connected; infinity if some never were."""

    num_lost: int
    """Nodes that lost their connection before the rank was stuck."""

    diagnosis_s: float
    """Time from the limit of the stuck rank until another node received the diagnosis; infinity if none did."""


def _print(arguments: argparse.Namespace, rounds: list[dict[str, Result]]) -> None:
    report = Report(
        "The stall guard's monitor on node 0",
        __file__,
        f"medians of {len(rounds)} rounds with minimum and maximum, {machine()}. A node has {NUM_RANKS} ranks and "
        f"{NUM_WORKERS} loader workers.",
        results=arguments.results,
    )
    columns = ("", "CPU of node 0's monitor, % of a core", "all nodes connected after, s", "connections lost")
    rows = []
    for name in rounds[0]:
        figures = zip(*(measured[name] for measured in rounds), strict=True)
        rows.append([name, *map(_spread, figures)])
    report.table([*columns, "diagnosis, s after the limit"], rows)


def _spread(values: Sequence[float]) -> str:
    median, low, high = (
        "never" if value == math.inf else f"{value:.1f}"
        for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({low} to {high})" if low != high else median


def measure(num_nodes: int) -> Result:
    """Runs the simulation once."""
    with tempfile.TemporaryDirectory() as directory:
        return _measure(num_nodes, Path(directory))


def _measure(num_nodes: int, directory: Path) -> Result:
    begins_at, port = time.monotonic() + START_S, _free_port()
    # The last node has a process of its own, in which the arrival of the diagnosis is noticed at once.
    others = num_nodes - 2
    bounds = [1 + others * number // NUM_SIMULATORS for number in range(NUM_SIMULATORS + 1)]
    spans = [(first, end) for first, end in itertools.pairwise([0, *bounds, num_nodes]) if first < end]
    environment = {**os.environ, "NESTGUARD_TOKEN": "the token of the benchmark"}
    started = []
    try:
        for first, end in spans:
            part = Part(str(directory), port, num_nodes, first, end, begins_at)
            command = own_command(__file__, "--part", json.dumps(part))
            with (directory / f"log-{first}").open("w") as log:
                started.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log))
        time.sleep(max(0.0, begins_at + CONNECT_S - time.monotonic()))
        monitor = int((directory / "monitor").read_text())
        cpu_s, at = _cpu_s(monitor), time.monotonic()
        time.sleep(max(0.0, part.stuck_at - time.monotonic()))
        load_percent = 100 * (_cpu_s(monitor) - cpu_s) / (time.monotonic() - at)
        for process in started[1:]:
            process.wait(part.ends_at - time.monotonic() + 60)
        found = [_result(directory, first) for first, _ in spans[1:]]
    finally:
        for process in started:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError, ValueError, UnboundLocalError):
            os.kill(monitor, signal.SIGKILL)  # its ranks have ended, but it may still write its report
    return Result(
        load_percent,
        max(one["connected_at"] for one in found) - begins_at,
        int(sum(one["num_lost"] for one in found)),
        found[-1]["stopped_at"] - part.stuck_at - LIMITS.step_s,
    )


def _result(directory: Path, first: int) -> dict[str, float]:
    path = directory / f"result-{first}"
    if not path.exists():
        raise RuntimeError(f"the process of node {first} has failed: {(directory / f'log-{first}').read_text()}")
    result: dict[str, float] = json.loads(path.read_text())
    return result


def simulate_node_0(part: Part) -> None:
    """Writes the heartbeats of node 0, and starts its monitor."""
    directory = Path(part.directory)
    beats = {reading.name: Heartbeat(directory / "beats", reading.identity) for reading in _readings(part, 0, 0.0)}
    monitor = start_monitor(
        directory / "beats", LIMITS, _identity(part, 0, 0, None), directory / "reports", _peers(part)
    )
    (directory / "monitor").write_text(str(monitor.pid))
    previous: dict[str, Reading] = {}
    entered: dict[str, int] = {}
    while time.monotonic() < part.ends_at:
        for reading in _readings(part, 0, time.monotonic()):
            if previous.get(reading.name) != reading:
                for _ in range(reading.collectives - entered.get(reading.name, 0)):
                    beats[reading.name].beat_collective(reading.step)
                entered[reading.name] = reading.collectives
                beats[reading.name].beat(reading.phase, reading.step, reading.microbatch, reading.cuts)
                previous[reading.name] = reading
        time.sleep(1.0)


def simulate_nodes(part: Part) -> None:
    """Plays the monitors of some nodes: each sends what its ranks and loader workers do once a second."""
    if part.end_node < part.num_nodes:
        # Hundreds of reports of thousands of ranks would fill the memory of this one machine.
        nestguard.connect.follower.StopDecision = _without_report  # type: ignore[attr-defined, assignment]
        gc.disable()
    time.sleep(max(0.0, part.begins_at - time.monotonic()))
    nodes = [_Node(part, node) for node in range(part.first_node, part.end_node)]
    result = {"connected_at": math.inf, "num_lost": 0, "stopped_at": math.inf}
    is_stuck = False
    for tick in range(1 << 30):
        now = time.monotonic()
        if result["connected_at"] == math.inf and all(node.follower.has_coordinator() for node in nodes):
            result["connected_at"] = now
        if not is_stuck and now > part.stuck_at:
            is_stuck = True
            result["num_lost"] = sum(not node.follower.has_coordinator() for node in nodes)
        if any(node.follower.decision() is not None for node in nodes):
            result["stopped_at"] = now
            break
        if now > part.ends_at:
            break
        # The nodes send at different moments within a second, as real ones do.
        for node in nodes[tick % TICKS :: TICKS]:
            node.send(now)
        time.sleep(max(0.0, now + 1 / TICKS - time.monotonic()))
    (Path(part.directory) / f"result-{part.first_node}").write_text(json.dumps(result))
    time.sleep(1.0)
    os._exit(0)  # without waiting for hundreds of threads


def _without_report(_report: object, _table: str) -> StopDecision:
    """Returns a decision to stop without its report."""
    return StopDecision({"processes": [], "cause": ""}, "")


class _Node:
    """The monitor of one node, without processes to watch."""

    def __init__(self, part: Part, node: int) -> None:
        self.part, self.node = part, node
        own = _identity(part, node, 0, None)
        self.follower = Follower(_peers(part), own, LIMITS, SharedToken(os.environ["NESTGUARD_TOKEN"]))

    def send(self, now: float) -> None:
        """Sends what the processes of the node do now."""
        views = [
            ProcessView(reading=reading, state=ProcessState.SLEEPING, age_s=now - reading.beat_ns / 1e9)
            for reading in _readings(self.part, self.node, now, num_workers=0)
        ]
        self.follower.send_views(views)


def _readings(part: Part, node: int, now: float, num_workers: int = NUM_WORKERS) -> list[Reading]:
    """Returns what the processes of a node do at a time: ranks, then loader workers."""
    step, phase, begun_at = _progress(min(now, part.stuck_at), part, node)
    readings = [_reading(part, node, rank, None, step, phase, begun_at) for rank in range(NUM_RANKS)]
    if now > part.stuck_at:
        step = int(part.stuck_at - part.begins_at) + 1
        waiting = (step, Phase.COLLECTIVE, part.stuck_at)
        readings = [_reading(part, node, rank, None, *waiting) for rank in range(NUM_RANKS)]
        if node == part.num_nodes - 1:
            readings[0] = _reading(part, node, 0, None, step, Phase.FORWARD, part.stuck_at)
    workers = range(num_workers)
    return readings + [
        _reading(part, node, worker % NUM_RANKS, worker // NUM_RANKS, None, Phase.LOADING, now - 0.5)
        for worker in workers
    ]


def _progress(now: float, part: Part, node: int) -> tuple[int, Phase, float]:
    """Returns the step, its phase and when the phase began. A step takes 1 s; nodes differ by 0.1 s."""
    seconds = max(0.0, now - part.begins_at + node % 8 / 80)
    number = int(len(PHASES) * seconds)
    begun_at = now - (seconds - number / len(PHASES))
    return number // len(PHASES), PHASES[number % len(PHASES)], begun_at


def _reading(
    part: Part, node: int, local_rank: int, worker: int | None, step: int | None, phase: Phase, begun_at: float
) -> Reading:
    identity = _identity(part, node, local_rank, worker)
    return Reading(
        identity=identity,
        name=identity.name,
        pid=10_000 + local_rank,
        start_ticks=123_456,
        is_armed=True,
        error_file=f"/tmp/torchelastic/none/attempt_0/{local_rank}/error.json",
        beat_ns=int(1e9 * begun_at),
        phase=phase,
        last_phase=phase,
        step=step,
        microbatch=None if step is None else 1,
        collectives=0 if step is None else step + (phase >= Phase.COLLECTIVE),
        first_step=None if step is None else 0,
        cuts=(f"corpus-{node}-{local_rank}-{step}-0001",),
        detail="",
    )


def _identity(part: Part, node: int, local_rank: int, worker: int | None) -> Identity:
    return Identity(
        rank=NUM_RANKS * node + local_rank,
        local_rank=local_rank,
        node_rank=node,
        world_size=NUM_RANKS * part.num_nodes,
        local_world_size=NUM_RANKS,
        host=f"node-{node}",
        worker=worker,
    )


def _peers(part: Part) -> PeerConfig:
    return PeerConfig(host="127.0.0.1", port=part.port, run_id="benchmark")


def _cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
