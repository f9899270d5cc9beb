"""What the monitors of several nodes exchange, and the role of a monitor that has no peers.

With several nodes, the monitor of node 0 is the coordinator: the other monitors, its followers, send it what they
observe, and it decides for the whole run, so that there is one table of all ranks. A monitor without a connection
decides for its own node. Losing a connection therefore makes a report less complete, but it never ends a run.

Both sides of a connection know a secret, the run token, which is never sent. Each side proves this by an HMAC over the
messages of both, with a nonce from each side, so that a recorded proof is useless later.
"""

import hmac
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from nestguard.observe.view import GuardError, NodeSilence, ProcessView

TOKEN_VARIABLE = "NESTGUARD_TOKEN"
"""Environment variable with the run token. It must be equal on all nodes."""


class Side(StrEnum):
    """The two sides of a connection between monitors."""

    COORDINATOR = "coordinator"
    FOLLOWER = "follower"


class SharedToken:
    """The run token of a monitor, which may become known after the monitor has started.

    Args:
        text: The token; empty if it is not known yet.
    """

    def __init__(self, text: str = "") -> None:
        self._text = text

    def set(self, text: str) -> None:
        """Sets the token, or replaces it. Any thread may call this."""
        self._text = text

    def get(self) -> bytes | None:
        """Returns the token; None if it is not known yet."""
        return self._text.encode() if self._text else None


def new_token() -> str:
    """Returns the run token: the environment variable NESTGUARD_TOKEN, or else a new random one.

    Rank 0 calls this, and sends the result to the other ranks.
    """
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)


class Handshake(NamedTuple):
    """The values over which both sides of a connection prove that they know the token."""

    run_id: str
    node_rank: int
    host: str
    """Host name of the follower."""

    coordinator_nonce: str
    follower_nonce: str

    def proof(self, token: bytes, side: Side) -> str:
        """Returns the proof of one side. It differs between the sides, so that neither can return the other's."""
        return hmac.new(token, json.dumps([side, *self]).encode(), "sha256").hexdigest()

    def is_proof(self, proof: object, token: bytes, side: Side) -> bool:
        """Returns whether this is the proof of the given side."""
        # JSON may contain surrogates, which cannot be encoded.
        given = proof.encode(errors="replace") if isinstance(proof, str) else b""
        return hmac.compare_digest(given, self.proof(token, side).encode())


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
