"""A connection between two monitors: messages in JSON over a stream of asyncio, with a limit for their size.

Each second, a follower sends the processes of its node. Messages carry ages, not times, because the clocks of nodes are
not synchronised.
"""

import asyncio
import contextlib
import json
import time
import zlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from nestguard.diagnose.stall_limits import StallLimits
from nestguard.observe.view import DevicePosition, Identity, Phase, ProcessState, ProcessView, Reading

SIZE_BYTES = 4
"""A message begins with the size of the rest in this many bytes."""

MAX_HANDSHAKE_BYTES = 4096
"""Limit for a message before the other side has proved that it belongs to the run."""

MAX_MESSAGE_BYTES = 256 << 20
"""Limit for a message after that, both as it is sent and when it is decompressed."""

_MAX_UNSENT_BYTES = 64 << 20
"""A peer that does not read is disconnected when this much waits to be sent."""

_COMPRESS_BYTES = 16 << 10
"""Messages of at least this size are compressed: the stacks and the rows of a report resemble each other."""

CLOSED_ERRORS = (asyncio.IncompleteReadError, OSError)
"""Errors of `Channel.receive` on a connection that has ended."""

Message = dict[str, Any]
"""A JSON object; its key `type` gives the kind of message."""


class InvalidMessageError(ValueError):
    """A message is too large or malformed."""

    def __init__(self, reason: str = "it sent a message that is too large or malformed") -> None:
        super().__init__(reason)


class Channel:
    """A connection. Only the thread of its event loop may use it. Times are from `time.monotonic()`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._is_trusted = False
        self.is_open = True
        self.received_at = time.monotonic()
        """When the last message arrived."""

        self.closed_at = 0.0

    @property
    def address(self) -> str:
        """Address of the other side."""
        return str((self._writer.get_extra_info("peername") or ["?"])[0]).removeprefix("::ffff:")

    def trust(self) -> None:
        """Allows messages of the size that monitors of this run send: the other side has proved that it is one."""
        self._is_trusted = True

    async def receive(self) -> Message:
        """Waits for the next message.

        Raises:
            InvalidMessageError: It is too large or malformed.
            CLOSED_ERRORS: The connection was closed.
        """
        max_bytes = MAX_MESSAGE_BYTES if self._is_trusted else MAX_HANDSHAKE_BYTES
        size = int.from_bytes(await self._reader.readexactly(SIZE_BYTES))
        if size > max_bytes:
            raise InvalidMessageError
        message = unpack(await self._reader.readexactly(size), max_bytes)
        self.received_at = time.monotonic()
        return message

    def send(self, packed: bytes, *, only_if_idle: bool = False) -> None:
        """Sends the result of `pack`, without waiting.

        Args:
            packed: The message.
            only_if_idle: Leaves it out if earlier messages still wait because the other side does not read.
        """
        unsent = self._writer.transport.get_write_buffer_size()
        if not self.is_open or (only_if_idle and unsent):
            return
        self._writer.write(packed)
        if unsent + len(packed) > _MAX_UNSENT_BYTES:
            self.close()

    def close(self) -> None:
        """Closes the connection once the other side has read what was sent."""
        if self.is_open:
            self.closed_at = time.monotonic()  # first: other threads read it once the channel is closed
            self.is_open = False
            self._writer.close()

    async def wait_closed(self) -> None:
        """Waits until everything is sent and the connection closed."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def run_loop(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, None]) -> None:
    """Runs an event loop until `main` has ended, then ends all other tasks and closes the loop."""

    async def run() -> None:
        await main
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    loop.run_until_complete(run())
    loop.close()


def pack(message: Message) -> bytes:
    """Returns a message as it is sent. For a message to many monitors, it is the same for all of them."""
    data = json.dumps(message, separators=(",", ":")).encode()
    data = data if len(data) < _COMPRESS_BYTES else zlib.compress(data, 1)
    return len(data).to_bytes(SIZE_BYTES) + data


def unpack(data: bytes, max_bytes: int) -> Message:
    """Returns the message that was packed, without its size.

    Args:
        data: The received bytes.
        max_bytes: Limit for the size of the JSON.

    Raises:
        InvalidMessageError: It is malformed.
    """
    try:
        if not data.startswith(b"{"):
            data = zlib.decompressobj().decompress(data, max_bytes)
        message = json.loads(data)
    except (RecursionError, ValueError, zlib.error) as error:  # RecursionError: brackets nested too deeply
        raise InvalidMessageError from error
    if not isinstance(message, dict):
        raise InvalidMessageError
    return message


def views_message(views: Sequence[ProcessView], limits: StallLimits) -> Message:
    """Returns the message about the processes of a node.

    Cuts and loader workers are left out unless a diagnosis can name them, because they are late, dead or stopped.
    """
    sent = []
    for view in views:
        is_late = view.is_dead or view.age_s > limits.shortest_s / 2
        reading = replace(view.reading, beat_ns=0, device_ns=0)  # times of this node
        if view.is_rank and not is_late:
            reading = replace(reading, cuts=(), waits_for=None)
        if view.is_rank or view.is_dead or view.state is ProcessState.STOPPED or (is_late and view.reading.cuts):
            sent.append(replace(view, reading=reading))
    return {"type": "views", "views": [asdict(view) for view in sent]}


def views_of(message: Message) -> list[ProcessView]:
    """Returns the processes in a message; raises one of `INVALID_VALUE_ERRORS` if it is malformed."""
    return [_view_of(view) for view in message["views"]]


def aged(view: ProcessView, seconds: float) -> ProcessView:
    """Returns a view with its ages advanced by some seconds."""
    ended_s = view.ended_s + seconds if view.state.has_ended else 0.0
    return replace(view, age_s=view.age_s + seconds, ended_s=ended_s)


def _view_of(data: Mapping[str, Any]) -> ProcessView:
    reading = data["reading"]
    device = reading["device"] and DevicePosition(*reading["device"])
    parsed = {
        "identity": Identity(**reading["identity"]),
        "phase": Phase(reading["phase"]),
        "last_phase": Phase(reading["last_phase"]),
        "cuts": tuple(reading["cuts"]),
        "device": device and device._replace(phase=Phase(device.phase)),
    }
    return ProcessView(**{**data, "reading": Reading(**{**reading, **parsed}), "state": ProcessState(data["state"])})
