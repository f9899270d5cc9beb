"""How monitors prove to each other that they belong to the same run.

Both sides of a connection know a secret, the run token, which is never sent. Each side proves this by an HMAC over the
messages of both, with a nonce from each side, so that a recorded proof is useless later.
"""

import hmac
import json
import os
import secrets
from enum import StrEnum
from typing import NamedTuple

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
