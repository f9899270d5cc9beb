"""A rank for tests: runs steps in which a barrier of files replaces the collective, and injects one fault.

python -m tests.nestguard.rank OPTIONS, with OPTIONS as JSON: see `main`.
"""

import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from nestguard import (
    Heartbeat,
    Identity,
    PeerConfig,
    Phase,
    StallLimits,
    current,
    set_current,
    start_monitor,
    start_worker,
)
from tests.nestguard.devices import CudaDevice, StandIn


def sleep_in_forward() -> None:
    time.sleep(60)


def hold_the_gil() -> None:
    sum(itertools.repeat(0, 10**11))  # a single call in C, during which no Python signal handler runs


def fail_on_purpose() -> None:
    raise ValueError("injected failure")


def load_a_broken_cut() -> None:
    time.sleep(60)


def run_worker(directory: Path) -> None:
    start_worker(0, 1)
    (directory / "worker.pid").write_text(str(os.getpid()))
    current().note_cuts(["cut-1", "cut-2"])
    current().note_cut("cut-2")
    load_a_broken_cut()


def wait_for_worker(directory: Path) -> None:
    current().beat(Phase.LOADING)
    worker = multiprocessing.get_context("fork").Process(target=run_worker, args=(directory,), daemon=True)
    worker.start()
    worker.join()


def barrier(directory: Path, rank: int, world_size: int, step: int) -> None:
    (directory / f"barrier-{step}-{rank}").touch()
    while not all((directory / f"barrier-{step}-{other}").exists() for other in range(world_size)):
        time.sleep(0.02)


def inject(fault: str, directory: Path) -> None:
    {
        "sleep": sleep_in_forward,
        "hold_gil": hold_the_gil,
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "abort": os.abort,
        "fail": fail_on_purpose,
        "worker": lambda: wait_for_worker(directory),
    }[fault]()


def train_on_device(options: dict[str, Any], identity: Identity, directory: Path) -> None:
    """Runs steps on a device: the host only launches kernels, and waits for the device once in each step."""
    heartbeat = current()
    device = StandIn() if options["device"] == "stand-in" else CudaDevice()
    heartbeat.watch_device(device.new_event, lambda: json.dumps(options["trace"]))
    hung = options["fault"] if identity.rank == options["faulty_rank"] else None
    for step in range(options["steps"]):
        is_faulty = step == 2
        heartbeat.beat(Phase.LOADING, step, 0)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            heartbeat.beat(phase)
            device.launch(hang=is_faulty and hung == phase.name)
        heartbeat.mark_device(Phase.COLLECTIVE)
        device.launch_collective(lambda step=step: barrier(directory, identity.rank, identity.world_size, step))
        device.launch(hang=is_faulty and hung == Phase.COLLECTIVE.name)
        heartbeat.beat_collective(step)
        device.wait()
        heartbeat.beat(Phase.OPTIMIZER)
        time.sleep(options["step_s"])


def train(options: dict[str, Any], identity: Identity, directory: Path) -> None:
    heartbeat = current()
    for step in range(options["steps"]):
        heartbeat.beat(Phase.LOADING, step, 0)
        heartbeat.note_cuts([f"cut-{step}"])
        heartbeat.beat(Phase.FORWARD)
        if step == 2 and options["fault"] is not None and identity.rank == options["faulty_rank"]:
            inject(options["fault"], directory)
        heartbeat.beat(Phase.BACKWARD)
        heartbeat.beat_collective(step)
        barrier(directory, identity.rank, identity.world_size, step)
        heartbeat.beat(Phase.OPTIMIZER)
        time.sleep(options["step_s"])


def main(argv: list[str]) -> None:
    options = json.loads(argv[0])
    identity = Identity(**options["identity"])
    directory = Path(options["directory"])
    beats = directory / f"beats-{identity.node_rank}"
    heartbeat = Heartbeat(beats, identity)
    heartbeat.arm()
    set_current(heartbeat)
    if identity.local_rank == 0:
        peers = None if options["peers"] is None else PeerConfig(**options["peers"])
        monitor = start_monitor(beats, StallLimits(**options["limits"]), identity, directory / "reports", peers)
        (directory / f"monitor-{identity.node_rank}.pid").write_text(str(monitor.pid))
        if options["token"] is not None:
            monitor.set_token(options["token"])
    try:
        (train if options["device"] is None else train_on_device)(options, identity, directory)
    except Exception as error:
        heartbeat.finish(Phase.FAILED, f"{type(error).__name__}: {error}", traceback.format_exc())
        sys.exit(1)
    if identity.local_rank == 0:
        (directory / f"was-alive-{identity.node_rank}").write_text(str(monitor.is_alive()))
    heartbeat.finish(Phase.DONE)


if __name__ == "__main__":
    main(sys.argv[1:])
