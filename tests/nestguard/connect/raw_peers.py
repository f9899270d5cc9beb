"""Connections to a monitor that speak its protocol by hand."""

import socket
from typing import Any

from nestguard import PeerConfig
from nestguard.connect.authentication import Handshake, Side
from nestguard.connect.follower import Connection
from tests.nestguard.runs import TOKEN

NONCE = "a nonce"


def connect(config: PeerConfig, timeout_s: float) -> Connection:
    return Connection(socket.create_connection((config.host, config.port), timeout_s))


def hello(config: PeerConfig, nonce: str, token: str = TOKEN, node: int = 1) -> tuple[dict[str, Any], Handshake]:
    """Returns the first message of a follower that has received this nonce, and what it proves."""
    handshake = Handshake(config.run_id, node, "b", nonce, NONCE)
    proof = handshake.proof(token.encode(), Side.FOLLOWER)
    fields = {"run_id": config.run_id, "node": node, "host": "b", "nonce": NONCE, "proof": proof}
    return {"type": "hello", **fields}, handshake


def join(config: PeerConfig, timeout_s: float) -> Connection:
    """Returns a connection that the coordinator has accepted as that of node 1."""
    connection = connect(config, timeout_s)
    challenge = connection.receive()
    assert challenge is not None
    message, handshake = hello(config, challenge["nonce"])
    connection.send(message)
    welcome = connection.receive()
    assert welcome is not None
    assert handshake.is_proof(welcome["proof"], TOKEN.encode(), Side.COORDINATOR)
    authenticate(connection, handshake, Side.FOLLOWER)
    return connection


def accept(connection: Connection, token: str = TOKEN) -> None:
    """Answers a follower as a coordinator with this token does."""
    connection.send({"type": "challenge", "nonce": NONCE})
    message = connection.receive()
    assert message is not None
    handshake = Handshake(message["run_id"], message["node"], message["host"], NONCE, message["nonce"])
    connection.send({"type": "welcome", "proof": handshake.proof(token.encode(), Side.COORDINATOR)})
    authenticate(connection, handshake, Side.COORDINATOR, token)


def authenticate(connection: Connection, handshake: Handshake, side: Side, token: str = TOKEN) -> None:
    other = Side.COORDINATOR if side is Side.FOLLOWER else Side.FOLLOWER
    connection.authenticate(handshake.seal(token.encode(), side), handshake.seal(token.encode(), other))
