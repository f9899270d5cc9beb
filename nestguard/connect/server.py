"""A TCP server for the frames of many monitors. One thread does all input and output, so that no peer delays another.

It knows nothing about the content of a frame, but it keeps strangers from holding resources: who is not accepted in
time is disconnected, and so is the oldest of those who wait if there are more of them than the run has monitors.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from nestguard.connect.frames import SIZE, Codec, InvalidFrameError

_log = logging.getLogger(__name__)
_RECEIVE_BYTES = 64 << 10
_MAX_UNSENT_BYTES = 64 << 20
"""A peer that reads nothing is disconnected when this much waits for it."""

_ACCEPT_PAUSE_S = 0.1
"""Delay before the next connection is accepted when the process has no free file descriptor."""

HANDSHAKE_S = 10.0
"""Time in which a peer has to be accepted."""


class Peer:
    """One connection. Any thread may send; the thread of the server receives. Times are those of `time.monotonic()`."""

    def __init__(self, connection: socket.socket, address: str, wake: Callable[["Peer"], None]) -> None:
        self.address = address
        self.codec = Codec()
        self.is_open = True
        self.is_accepted = False
        """Whether the handler has accepted the peer; otherwise, it is disconnected after `HANDSHAKE_S`."""

        self.opened_at = self.received_at = time.monotonic()
        self.closed_at = 0.0
        self.socket = connection
        """Socket that the server reads and writes."""

        self._wake = wake
        self._sending = threading.Lock()
        self._unsent = bytearray()
        self._received = bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether earlier frames still wait because the peer does not read fast enough."""
        return bool(self._unsent)

    def send(self, payload: bytes) -> None:
        """Sends the result of `frames.pack`, without waiting."""
        with self._sending:
            if not self.is_open:
                return
            frame = self.codec.frame(payload)
            if self._unsent:
                self._unsent += frame
            else:
                self._unsent += frame[self._try_to_send(frame) :]
            has_unsent = bool(self._unsent)
        if has_unsent:
            self._wake(self)

    def send_unsent(self) -> None:
        """Continues to send earlier frames. Only the server calls this."""
        with self._sending:
            del self._unsent[: self._try_to_send(self._unsent)]

    def frames(self, data: bytes) -> list[bytes]:
        """Returns the frames that are complete with these bytes. Only the server calls this.

        Raises:
            InvalidFrameError: A frame is too large.
        """
        received = self._received
        received += data
        frames = []
        at = 0
        while (size := self.codec.frame_size(received[at : at + SIZE.size])) is not None:
            end = at + SIZE.size + size
            if end > len(received):
                break
            frames.append(bytes(received[at + SIZE.size : end]))
            at = end
        del received[:at]
        return frames

    def close(self) -> None:
        """Closes the connection. Any thread may call this; the server forgets the peer soon after."""
        if self.is_open:
            self.closed_at = time.monotonic()
            self.is_open = False
            # The socket itself is closed by the thread that waits for it.
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def _try_to_send(self, data: bytes | bytearray) -> int:
        """Returns how many bytes were sent; closes the connection if it is broken or if too much waits."""
        sent = 0
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return len(data)
        if len(data) - sent > _MAX_UNSENT_BYTES:
            self.close()
        return sent


class Handler(Protocol):
    """What the server calls, always in its own thread."""

    def opened(self, peer: Peer) -> None:
        """A connection was opened."""

    def received(self, peer: Peer, frame: bytes) -> None:
        """A frame has arrived."""

    def closed(self, peer: Peer, reason: str) -> None:
        """A connection was closed; `reason` is empty if the peer closed it."""


class Server:
    """Accepts connections until it is closed.

    Args:
        listeners: Sockets that listen; closed with the server.
        handler: Receives what happens on the connections.
        max_waiting: How many peers may wait to be accepted at a time.
    """

    def __init__(self, listeners: Sequence[socket.socket], handler: Handler, max_waiting: int) -> None:
        self._handler = handler
        self._max_waiting = max_waiting
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._peers: dict[socket.socket, Peer] = {}
        self._waiting: list[Peer] = []
        """Peers that may not have been accepted yet, the oldest first."""

        self._with_unsent: set[Peer] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Closes the port and all connections, after everything that can be sent at once was sent."""
        self._is_closed = True
        self._interrupt()
        self._thread.join()

    def _interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def _wake(self, peer: Peer) -> None:
        with self._lock:
            self._with_unsent.add(peer)
        self._interrupt()

    def _run(self) -> None:
        while not self._is_closed:
            timeout_s = 1.0 if self._waiting else None
            for key, events in self._selector.select(timeout_s):
                if key.fileobj in self._listeners:
                    self._accept(cast(socket.socket, key.fileobj))
                elif key.fileobj is self._wake_read:
                    self._watch_unsent()
                else:
                    self._serve(self._peers[key.fileobj], events)  # type: ignore[index]
            self._close_overdue()
        for peer in list(self._peers.values()):
            self._forget(peer, "")
        self._selector.close()
        for endpoint in (*self._listeners, self._wake_read, self._wake_write):
            endpoint.close()

    def _accept(self, listener: socket.socket) -> None:
        """Accepts the connections that wait in the backlog, some at a time."""
        for _ in range(self._max_waiting):
            try:
                accepted, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                _log.debug("cannot accept a connection: %s", error)
                time.sleep(_ACCEPT_PAUSE_S)
                return
            accepted.setblocking(False)
            with contextlib.suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(accepted, str(address[0]).removeprefix("::ffff:"), self._wake)
            self._peers[accepted] = peer
            self._waiting.append(peer)
            self._selector.register(accepted, selectors.EVENT_READ)
            self._handler.opened(peer)

    def _serve(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.send_unsent()
            if not peer.has_unsent:
                self._selector.modify(peer.socket, selectors.EVENT_READ)
        if events & selectors.EVENT_READ:
            try:
                data = peer.socket.recv(_RECEIVE_BYTES)
                frames = peer.frames(data)
            except BlockingIOError:
                return
            except InvalidFrameError as error:
                self._forget(peer, str(error))
                return
            except OSError:
                data, frames = b"", []
            for frame in frames:
                if peer.is_open:
                    self._handler.received(peer, frame)
            if not data or not peer.is_open:
                self._forget(peer, "")

    def _watch_unsent(self) -> None:
        """Lets `select` report when peers with unsent frames can be sent to again."""
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        with self._lock:
            peers, self._with_unsent = self._with_unsent, set()
        for peer in peers:
            if peer.socket in self._peers:
                self._selector.modify(peer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _close_overdue(self) -> None:
        """Disconnects peers that were not accepted in time, and the oldest if too many wait."""
        self._waiting = [peer for peer in self._waiting if peer.is_open and not peer.is_accepted]
        earliest = time.monotonic() - HANDSHAKE_S
        num_excess = len(self._waiting) - self._max_waiting
        for number, peer in enumerate(self._waiting):
            if number < num_excess or peer.opened_at < earliest:
                self._forget(peer, "it did not prove that it belongs to this run in time")

    def _forget(self, peer: Peer, reason: str) -> None:
        peer.close()
        del self._peers[peer.socket]
        self._selector.unregister(peer.socket)
        peer.socket.close()
        self._handler.closed(peer, reason)
