"""What the monitors of several nodes exchange, and the role of a monitor that has no peers.

With several nodes, the monitor of node 0 is the coordinator: the other monitors, its followers, send it what they
observe, and it decides for the whole run, so that there is one table of all ranks. A monitor without a connection
decides for its own node. Losing a connection therefore makes a report less complete, but it never ends a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nestguard.observe.errors import GuardError
from nestguard.observe.view import NodeSilence, ProcessView


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Where the monitors of several nodes connect to each other."""

    host: str
    """Host name or address of node 0, at which its monitor listens."""

    port: int
    """Port on which the monitor of node 0 listens."""

    run_id: str = ""
    """Identifies the run, together with the token. It is not secret; it refuses monitors of an earlier attempt."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise GuardError(f"peers.port is {self.port}: expected a port from 1 to 65535.")


class StopDecision(NamedTuple):
    """The decision to end the run, as the coordinator sends it to its followers."""

    report: dict[str, Any]
    """Result of `Report.to_json`."""

    table: str
    """Result of `Report.table`."""

    def culprits(self) -> set[str]:
        """Returns the names of the processes that caused the run to stop."""
        return {process["name"] for process in self.report["processes"] if process["is_culprit"]}

    def reason_for(self, name: str) -> str:
        """Returns the diagnosis of one process in one line."""
        for process in self.report["processes"]:
            if process["name"] == name:
                return f"{name}, {process['diagnosis']}: {process['reason']}"
        return str(self.report["cause"])


class LocalOnly:
    """Role of a monitor without peers: it sends nothing and decides alone. `Coordinator` and `Follower` extend it."""

    def send_views(self, views: Sequence[ProcessView]) -> None:
        """Sends what this node observes; also tells the peers that this monitor is alive.

        Args:
            views: The processes of this node, as they are now.
        """

    def views(self) -> list[ProcessView]:
        """Returns the ranks of the other nodes, and the loader workers there that a diagnosis may name."""
        return []

    def silences(self) -> dict[int, NodeSilence]:
        """Returns, by node rank, how long each connected node has sent nothing."""
        return {}

    def disconnected_s(self) -> float:
        """Returns the seconds since the connection to the coordinator was lost; 0 if it never was."""
        return 0.0

    def has_coordinator(self) -> bool:
        """Returns whether another, connected monitor decides for this node."""
        return False

    def decision(self) -> StopDecision | None:
        """Returns the coordinator's decision to end the run, if there is one."""
        return None

    def send_stop(self, decision: StopDecision) -> None:
        """Tells the followers to end their ranks."""

    def send_dumps(self, dumps: Mapping[str, str]) -> None:
        """Sends stacks and tracebacks, by file name, to the coordinator."""

    def receive_dumps(self, timeout_s: float) -> dict[str, str]:  # noqa: ARG002
        """Returns the stacks and tracebacks of the followers; waits for them for at most `timeout_s` seconds."""
        return {}

    def close(self) -> None:
        """Tells the peers that this monitor exits, and closes the connections."""
