"""A follower's connection to the coordinator, and the JSON form of a process view."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

from nestguard.connect.authentication import AuthenticationError, Seal
from nestguard.connect.frames import SIZE, Codec, InvalidFrameError, Message, pack
from nestguard.observe.process import ProcessState
from nestguard.observe.record import DevicePosition, Identity, Phase, Reading
from nestguard.observe.view import ProcessView

_SEND_TIMEOUT_S = 2
_TYPES: Mapping[type, Mapping[str, Any]] = {kind: get_type_hints(kind) for kind in (Identity, Reading)}

INVALID_MESSAGE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a message with missing keys or values of the wrong type can raise."""


class Connection:
    """A follower's connection to the coordinator.

    One thread receives; any thread may send. Until `authenticate` is called, waiting for a message is limited by the
    timeout of the socket. Times are seconds of `time.monotonic()`.
    """

    def __init__(self, connection: socket.socket) -> None:
        # A frozen peer stops reading, and sending to it must not block this monitor.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_TIMEOUT_S, 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._codec = Codec()
        self._socket = connection
        self._file: BinaryIO = connection.makefile("rb")
        self._sending = threading.Lock()
        self.received_at = time.monotonic()
        """When the last message arrived."""

        self.closed_at = 0.0
        self.is_open = True
        self.received_goodbye = False
        """Whether the peer announced that it would close the connection."""

    def authenticate(self, sending: Seal, receiving: Seal) -> None:
        """Requires that every further message is authentic. From now on, `receive` waits without a limit."""
        self._codec.authenticate(sending, receiving)
        self._socket.settimeout(None)

    def send(self, message: Message) -> None:
        """Sends a message; closes the connection if that fails or takes longer than two seconds."""
        if not self.is_open:
            return
        try:
            with self._sending:
                self._socket.sendall(self._codec.frame(pack(message)))
        except OSError:
            self.close()

    def receive(self) -> Message | None:
        """Waits for the next message; returns None once the connection is closed or the peer sends no valid message."""
        try:
            message = self._receive()
        except (OSError, InvalidFrameError, AuthenticationError):
            message = None
        if message is None:
            self.close()
            return None
        self.received_at = time.monotonic()
        if message.get("type") == "goodbye":
            self.received_goodbye = True
        return message

    def _receive(self) -> Message | None:
        size = self._codec.frame_size(self._file.read(SIZE.size))
        frame = b"" if size is None else self._file.read(size)
        return None if size is None or len(frame) < size else self._codec.message(frame)

    def close(self) -> None:
        """Closes the connection."""
        if self.is_open:
            self.closed_at = time.monotonic()
        self.is_open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def view_to_json(view: ProcessView) -> dict[str, Any]:
    """Returns the JSON form of a view. It holds ages, not times, because the clocks of nodes are not synchronised."""
    reading = asdict(view.reading)
    return {
        "reading": {**reading, "beat_ns": 0, "device_ns": 0, "phase": view.reading.phase.name},
        "state": view.state.value,
        "age_s": view.age_s,
        "ended_s": view.ended_s,
        "exit_signal": view.exit_signal,
    }


def view_from_json(data: Mapping[str, Any]) -> ProcessView:
    """Returns the view that `view_to_json` converted, with `beat_ns` and `device_ns` 0.

    Raises one of `INVALID_MESSAGE_ERRORS` if a key is missing or a value has the wrong type.
    """
    fields = data["reading"]
    identity = Identity(**fields["identity"])
    reading = Reading(
        **{
            **fields,
            "identity": identity,
            "phase": Phase[fields["phase"]],
            "last_phase": Phase(fields["last_phase"]),
            "cuts": tuple(fields["cuts"]),
            "device": None if fields["device"] is None else checked_position(fields["device"]),
        }
    )
    _check_types(identity)
    _check_types(reading)
    return ProcessView(
        reading=reading,
        state=ProcessState(data["state"]),
        age_s=float(data["age_s"]),
        ended_s=float(data["ended_s"]),
        exit_signal=None if data["exit_signal"] is None else int(data["exit_signal"]),
    )


def checked_position(values: Sequence[Any]) -> DevicePosition:
    """Returns the position of a device; raises one of `INVALID_MESSAGE_ERRORS` if the values are not one."""
    phase, step, microbatch = values
    if not all(value is None or type(value) is int for value in (step, microbatch)):
        raise TypeError(f"the position of a device is {values!r}")
    return DevicePosition(Phase(phase), step, microbatch)


def _check_types(record: Identity | Reading) -> None:
    """Raises TypeError unless every field of a dataclass has its annotated type."""
    for name, hint in _TYPES[type(record)].items():
        value = getattr(record, name)
        if get_origin(hint) is tuple:
            is_valid = all(isinstance(item, get_args(hint)[0]) for item in value)
        else:
            is_valid = isinstance(value, hint)
        if not is_valid:
            raise TypeError(f"{name} is {value!r}")
