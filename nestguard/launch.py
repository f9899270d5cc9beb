"""Starts the monitor of a node from the node's first local rank."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from nestguard.connect.peers import PeerConfig
from nestguard.diagnose.stall_limits import StallLimits
from nestguard.observe.directory import lock_directory
from nestguard.observe.view import GuardError, Identity

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a launcher may send to all processes of a job. The monitor has to watch the ranks until they exit."""

_started: list["subprocess.Popen[bytes]"] = []
"""References that are kept for the lifetime of this process.

A monitor may run longer than its handle exists. `Popen` would warn when it is collected while its process runs.
"""


class MonitorHandle:
    """The running monitor process of this node."""

    def __init__(self, process: "subprocess.Popen[bytes]", token_fd: int | None) -> None:
        self._process = process
        self._token_fd = token_fd

    @property
    def pid(self) -> int:
        """Process id of the monitor."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Returns whether the monitor still runs. It exits by itself when the ranks of the node have ended."""
        return self._process.poll() is None

    def set_token(self, token: str) -> None:
        """Gives the monitor the run token, which is `new_token()` of rank 0 and equal on all nodes.

        It takes precedence over the environment variable NESTGUARD_TOKEN. Only the first call has an effect, and none
        does on a single node.
        """
        if self._token_fd is None:
            return
        with contextlib.suppress(OSError):  # the monitor has exited
            os.write(self._token_fd, token.encode() + b"\n")
        os.close(self._token_fd)
        self._token_fd = None

    def wait(self, timeout_s: float) -> bool:
        """Waits for at most `timeout_s` seconds until the monitor has exited; returns whether it has."""
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
    """Starts the monitor of a node; to be called by the first local rank of each node.

    The monitor outlives this rank and writes to the rank's standard error.

    Args:
        directory: Where the processes of this node write their heartbeats.
        limits: How long a process may go without a heartbeat.
        identity: Identity of the calling rank.
        report_dir: Where a report, `stall-TIME/`, is written.
        peers: Where the monitors of several nodes connect to each other; None for a single node. They connect once they
            know the run token, from the environment variable NESTGUARD_TOKEN or from `MonitorHandle.set_token`.

    Raises:
        GuardError: The monitor process cannot be started, or the directory is not safe.
    """
    try:
        lock = lock_directory(directory)  # the monitor inherits it, so it is never without one
    except OSError as error:
        raise GuardError(f"{directory} cannot be watched: {error}.") from error
    options = {
        "directory": str(lock.path),
        "lock": lock.fd,
        "starter": os.getpid(),
        "report_dir": str(Path(report_dir).resolve()),
        "limits": asdict(limits),
        "identity": asdict(identity),
        "peers": None if peers is None else asdict(peers),
    }
    command = [sys.executable, "-P", "-m", "nestguard", json.dumps(options)]
    # The rank may have found this package in the folder of its script, which is not on the monitor's sys.path.
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    # The token travels through a pipe: arguments are visible to every user of the machine.
    stdin, token_fd = (subprocess.DEVNULL, None) if peers is None else os.pipe()
    # A signal before the monitor can ignore signals would end it. It inherits the mask of this thread.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
            pass_fds=(lock.fd,),
        )
    except OSError as error:
        if token_fd is not None:
            os.close(token_fd)
        raise GuardError(f"The monitor process cannot be started: {error}.") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        lock.pass_on()
        if stdin != subprocess.DEVNULL:
            os.close(stdin)
    _started[:] = [process, *(other for other in _started if other.poll() is None)]
    return MonitorHandle(process, token_fd)
