"""Frames of a connection between two monitors: one message each, authenticated once the sides know each other."""

import json
import struct
import zlib
from typing import Any

from nestguard.connect.authentication import MAC_SIZE, Seal

SIZE = struct.Struct("!I")
"""The first bytes of a frame: the size of the rest."""

_MAX_HANDSHAKE_BYTES = 4096
"""Limit for a frame before the other side is authenticated."""

_MAX_FRAME_BYTES = 32 << 20
_MAX_MESSAGE_BYTES = 256 << 20
_COMPRESS_BYTES = 16 << 10
"""Messages of at least this size are compressed: the stacks and the rows of a report resemble each other."""

Message = dict[str, Any]
"""A JSON object; its key `type` gives the kind of message."""


class InvalidFrameError(ValueError):
    """A frame is too large, or its content is not a message."""


class Codec:
    """Converts the messages of one connection to frames and back.

    A frame is the size of the rest in 4 bytes, an authentication code once both sides are authenticated, and the
    message as JSON, compressed if it is long.
    """

    def __init__(self) -> None:
        self._sending: Seal | None = None
        self._receiving: Seal | None = None

    @property
    def is_authenticated(self) -> bool:
        """Whether both sides have proved that they belong to the run."""
        return self._receiving is not None

    def authenticate(self, sending: Seal, receiving: Seal) -> None:
        """Requires an authentication code in every further frame."""
        self._sending, self._receiving = sending, receiving

    def frame(self, payload: bytes) -> bytes:
        """Returns the next frame, which contains the result of `pack`."""
        mac = b"" if self._sending is None else self._sending.next_mac(payload)
        return SIZE.pack(len(mac) + len(payload)) + mac + payload

    def frame_size(self, received: bytes | bytearray) -> int | None:
        """Returns the size of the frame that begins here, without its first 4 bytes; None if these are incomplete.

        Raises:
            InvalidFrameError: The frame is larger than a monitor of this run would send.
        """
        if len(received) < SIZE.size:
            return None
        (size,) = SIZE.unpack_from(received)
        limit = _MAX_FRAME_BYTES if self.is_authenticated else _MAX_HANDSHAKE_BYTES
        if size > limit:
            raise InvalidFrameError("no frame of a monitor")
        return int(size)

    def message(self, frame: bytes) -> Message:
        """Returns the message of the next frame, which is given without its first 4 bytes.

        Raises:
            AuthenticationError: The frame does not come from the other monitor.
            InvalidFrameError: The content is not a message.
        """
        payload = frame
        if self._receiving is not None:
            payload = frame[MAC_SIZE:]
            self._receiving.check_next(frame[:MAC_SIZE], payload)
        return _unpack(payload, _MAX_MESSAGE_BYTES if self.is_authenticated else _MAX_HANDSHAKE_BYTES)


def pack(message: Message) -> bytes:
    """Returns the content of a frame. For a message to many monitors, it is the same for all of them."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return data if len(data) < _COMPRESS_BYTES else zlib.compress(data, 1)


def _unpack(payload: bytes, max_bytes: int) -> Message:
    try:
        if not payload.startswith(b"{"):
            payload = zlib.decompressobj().decompress(payload, max_bytes)
        message = json.loads(payload)
    except (RecursionError, ValueError, zlib.error) as error:  # RecursionError: brackets nested too deeply
        raise InvalidFrameError("no message of a monitor") from error
    if not isinstance(message, dict):
        raise InvalidFrameError("no message of a monitor")
    return message
