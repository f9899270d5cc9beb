"""Monitors of two nodes on this machine, for tests."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from nestguard import PeerConfig, StallLimits
from nestguard.connect.channel import SIZE_BYTES, pack, unpack
from nestguard.connect.coordinator import Coordinator
from nestguard.connect.follower import Follower
from nestguard.connect.peers import Handshake, SharedToken, Side
from tests.nestguard.runs import PATIENCE_S, TOKEN
from tests.nestguard.views import view
from tests.ports import free_port

LIMITS = StallLimits(step_s=30, first_step_s=90, validation_s=60, checkpoint_s=60, finishing_s=30, node_silence_s=10)


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


@contextlib.contextmanager
def closing(peers: T) -> Iterator[T]:
    try:
        yield peers
    finally:
        peers.close()


def soon(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def new_config() -> PeerConfig:
    return PeerConfig(host="127.0.0.1", port=free_port(), run_id="this run")


def coordinator_of(config: PeerConfig, token: SharedToken | None = None) -> Coordinator:
    return Coordinator(config, view(0, world_size=4).reading.identity, token or SharedToken(TOKEN))


def follower_of(
    config: PeerConfig, token: SharedToken | None = None, node_rank: int = 1, limits: StallLimits = LIMITS
) -> Follower:
    identity = view(1 + node_rank, node_rank=node_rank).reading.identity
    return Follower(config, identity, limits, token or SharedToken(TOKEN))


NONCE = "a nonce"


class RawPeer:
    """One side of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self._socket, self._file = connection, connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(pack(message))

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message; None once the other side has closed the connection."""
        with contextlib.suppress(ConnectionError):
            size = int.from_bytes(self._file.read(SIZE_BYTES))
            return unpack(self._file.read(size), 1 << 30) if size else None
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(config: PeerConfig) -> RawPeer:
    return RawPeer(socket.create_connection((config.host, config.port)))


def hello(config: PeerConfig, nonce: str, token: str = TOKEN, node: int = 1) -> tuple[dict[str, Any], Handshake]:
    """Returns the first message of a follower that has received this nonce, and what it proves."""
    handshake = Handshake(config.run_id, node, "b", nonce, NONCE)
    proof = handshake.proof(token.encode(), Side.FOLLOWER)
    return {"type": "hello", "node": node, "host": "b", "nonce": NONCE, "proof": proof}, handshake


def join(config: PeerConfig) -> RawPeer:
    """Returns a connection that the coordinator has accepted as that of node 1."""
    peer = connect(config)
    challenge = peer.receive()
    assert challenge is not None
    message, handshake = hello(config, challenge["nonce"])
    peer.send(message)
    welcome = peer.receive()
    assert welcome is not None
    assert handshake.is_proof(welcome["proof"], TOKEN.encode(), Side.COORDINATOR)
    return peer


def accept(peer: RawPeer, config: PeerConfig, token: str = TOKEN) -> None:
    """Answers a follower as a coordinator with this token does."""
    peer.send({"type": "challenge", "nonce": NONCE})
    message = peer.receive()
    assert message is not None
    handshake = Handshake(config.run_id, message["node"], message["host"], NONCE, message["nonce"])
    peer.send({"type": "welcome", "proof": handshake.proof(token.encode(), Side.COORDINATOR)})
