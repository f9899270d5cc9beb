"""Starting the monitor of a node from its first local rank."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from nestguard.errors import GuardError
from nestguard.limits import StallLimits
from nestguard.peers import PeerConfig
from nestguard.record import Identity

_started: list["subprocess.Popen[bytes]"] = []
"""Kept for as long as this process lives: a monitor may outlive its handle, which is no mistake."""


class MonitorHandle:
    """The monitor of this node, as the rank that started it sees it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it watches. It ends by itself when all is done."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Waits until it has ended; returns whether it has."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def start_monitor(
    directory: Path,
    limits: StallLimits,
    identity: Identity,
    report_dir: Path,
    peers: PeerConfig | None = None,
) -> MonitorHandle:
    """Starts the monitor of a node, which outlives the rank that starts it; its standard error is that of the rank.

    For the first local rank of each node.

    Args:
        directory: Where the heartbeats of the node lie.
        limits: How long a process may be silent.
        identity: Of this rank.
        report_dir: Where `stall-TIME/` is written.
        peers: Where monitors meet, if there are several nodes.

    Raises:
        GuardError: It cannot be started.
    """
    words = [sys.executable, "-P", "-m", "nestguard", str(Path(directory).resolve())]
    words += ["--report-dir", str(Path(report_dir).resolve())]
    words += ["--limits", json.dumps(asdict(limits)), "--identity", json.dumps(asdict(identity))]
    if peers is not None:
        words += ["--peers", json.dumps(asdict(peers))]
    # The package may be found by the folder of the script alone, which the monitor does not have.
    found = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in found if path)}
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, env=environment
        )
    except OSError as error:
        raise GuardError(f"The monitor cannot be started: {error}.") from error
    _started[:] = [process, *(each for each in _started if each.poll() is None)]
    return MonitorHandle(process)
