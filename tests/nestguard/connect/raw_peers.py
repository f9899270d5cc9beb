"""Connections to a monitor that speak its protocol by hand."""

import contextlib
import socket
from typing import Any

from nestguard import PeerConfig
from nestguard.connect.channel import SIZE_BYTES, pack, unpack
from nestguard.connect.peers import Handshake, Side
from tests.nestguard.runs import PATIENCE_S, TOKEN

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
