"""How monitors prove to each other that they belong to the same run.

Both sides of a connection know a secret, the run token, which is never sent. Each side proves this by an HMAC over
two nonces, one from each side, so that a recorded proof is of no use later. The nonces also yield a key for each
direction, and every further message carries an HMAC over its number and its content.
"""

import hmac
import json
import os
import secrets
import threading
from enum import StrEnum
from typing import NamedTuple

TOKEN_VARIABLE = "NESTGUARD_TOKEN"
"""Environment variable with the run token. It must be equal on all nodes."""

MAC_SIZE = 16
_NONCE_SIZE = 16
_DIGEST = "sha256"


class AuthenticationError(ValueError):
    """A message does not come from a monitor that belongs to this run."""


class Side(StrEnum):
    """The two sides of a connection between monitors."""

    COORDINATOR = "coordinator"
    FOLLOWER = "follower"


class SharedToken:
    """The run token as one monitor knows it. It may become known after the monitor has started.

    Args:
        text: The token; empty if it is not known yet.
    """

    def __init__(self, text: str = "") -> None:
        self._is_known = threading.Event()
        self._text = ""
        if text:
            self.set(text)

    def set(self, text: str) -> None:
        """Sets the token, or replaces it. Any thread may call this."""
        self._text = text
        self._is_known.set()

    def get(self) -> bytes | None:
        """Returns the token; None if it is not known yet."""
        return self._text.encode() if self._text else None

    def wait(self, timeout_s: float) -> bytes | None:
        """Waits for the token for at most `timeout_s` seconds; returns None if it is still not known."""
        self._is_known.wait(max(0.0, timeout_s))
        return self.get()


def new_token() -> str:
    """Returns the run token: that of the environment variable NESTGUARD_TOKEN, or else a new random one.

    Rank 0 calls this, and sends the result to the other ranks.
    """
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)


def new_nonce() -> str:
    """Returns a random text that is used once."""
    return secrets.token_hex(_NONCE_SIZE)


class Handshake(NamedTuple):
    """What both sides of a connection have said when they prove that they know the token."""

    run_id: str
    node_rank: int
    host: str
    """Host name of the follower."""

    coordinator_nonce: str
    follower_nonce: str

    def proof(self, token: bytes, side: Side) -> str:
        """Returns the proof of one side. It differs between the sides, so that neither can return the other's."""
        return self._mac(token, f"proof of the {side}").hex()

    def is_proof(self, proof: object, token: bytes, side: Side) -> bool:
        """Returns whether this is the proof of the given side."""
        if not isinstance(proof, str):
            return False
        # JSON may contain surrogates, which cannot be encoded.
        return hmac.compare_digest(proof.encode(errors="replace"), self.proof(token, side).encode())

    def seal(self, token: bytes, side: Side) -> "Seal":
        """Returns the seal of the messages that one side sends."""
        return Seal(self._mac(token, f"messages of the {side}"))

    def _mac(self, token: bytes, purpose: str) -> bytes:
        return hmac.digest(token, json.dumps([purpose, *self]).encode(), _DIGEST)


class Seal:
    """Authenticates the messages of one direction in their order: none can be changed, dropped, repeated or added."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next_mac(self, payload: bytes) -> bytes:
        """Returns the code that authenticates the next message."""
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8) + payload, _DIGEST)[:MAC_SIZE]

    def check_next(self, mac: bytes, payload: bytes) -> None:
        """Raises AuthenticationError unless this is the next message of the other side."""
        if not hmac.compare_digest(mac, self.next_mac(payload)):
            raise AuthenticationError("a message that the other monitor did not send")
