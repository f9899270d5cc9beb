"""What goes between two monitors: lines of JSON over a connection, and a view of a process as JSON."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

from nestguard.process import ProcessState
from nestguard.record import Identity, Phase, Reading
from nestguard.view import ProcessView

_LONGEST_LINE = 32 << 20
_SEND_S = 2

Message = dict[str, Any]
"""With its `type`."""


class Line:
    """A connection, and what has come over it."""

    def __init__(self, connection: socket.socket) -> None:
        # So that a frozen peer does not hold up the one that talks to it.
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_S, 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._file: BinaryIO = connection.makefile("rb")
        self._sending = threading.Lock()
        self.heard = time.monotonic()
        self.closed = 0.0
        self.is_open = True
        self.said_goodbye = False

    def send(self, message: Message) -> None:
        """Sends a line; a line that breaks is closed."""
        if not self.is_open:
            return
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.close()

    def receive(self) -> Message | None:
        """Returns the next message; None at the end."""
        try:
            line = self._file.readline(_LONGEST_LINE)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            message = None
        if not isinstance(message, dict):
            self.close()
            return None
        self.heard = time.monotonic()
        if message.get("type") == "goodbye":
            self.said_goodbye = True
        return message

    def close(self) -> None:
        """Hangs up."""
        if self.is_open:
            self.closed = time.monotonic()
        self.is_open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def view_to_json(view: ProcessView) -> dict[str, Any]:
    """A view as another node is told of it."""
    reading = asdict(view.reading)
    return {
        "reading": {**reading, "beat_ns": 0, "phase": view.reading.phase.name},
        "state": view.state.value,
        "age_s": view.age_s,
        "ended_s": view.ended_s,
    }


def view_from_json(data: Mapping[str, Any]) -> ProcessView:
    """The view that was told."""
    told = data["reading"]
    reading = Reading(
        **{
            **told,
            "identity": Identity(**told["identity"]),
            "phase": Phase[told["phase"]],
            "cuts": tuple(told["cuts"]),
        }
    )
    return ProcessView(reading=reading, state=ProcessState(data["state"]), age_s=data["age_s"], ended_s=data["ended_s"])
