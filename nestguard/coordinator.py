"""Role of the monitor of node 0: it receives what all other monitors observe and decides for the whole run."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from nestguard.peers import LocalOnly, PeerConfig, StopDecision
from nestguard.process import ProcessState
from nestguard.view import NodeSilence, ProcessView
from nestguard.wire import INVALID_MESSAGE_ERRORS, Connection, view_from_json

_log = logging.getLogger(__name__)
_POLL_S = 0.05


class _FollowerState:
    """Connection to a follower, and what the follower has sent."""

    def __init__(self, connection: Connection, node_rank: int, host: str) -> None:
        self.connection = connection
        self.node_rank = node_rank
        self.host = host
        self.views: list[ProcessView] = []
        self.views_at = connection.received_at
        self.dumps: dict[str, str] | None = None


class Coordinator(LocalOnly):
    """Role of the monitor of node 0.

    Raises:
        OSError: The port is taken or may not be used.
    """

    def __init__(self, config: PeerConfig) -> None:
        self._config = config
        self._followers: dict[int, _FollowerState] = {}
        self._lock = threading.Lock()
        self._listener = _listen_on(config.port)
        threading.Thread(target=self._accept, daemon=True).start()

    def send_views(self, views: Sequence[ProcessView]) -> None:  # noqa: ARG002
        """Tells the followers that this monitor is alive. They do not need its views."""
        for follower in self._all():
            follower.connection.send({"type": "keepalive"})

    def views(self) -> list[ProcessView]:
        """Returns the last views of the followers, with their ages advanced to now.

        The ranks of a node whose connection was lost are unseen, and its loader workers are left out.
        """
        now = time.monotonic()
        views = []
        for follower in self._all():
            current = [_aged(view, now - follower.views_at) for view in follower.views]
            connection = follower.connection
            if not connection.is_open and not connection.received_goodbye:
                lost_s = now - connection.closed_at
                current = [replace(view, state=ProcessState.UNSEEN, ended_s=lost_s) for view in current if view.is_rank]
            views += current
        return views

    def silences(self) -> dict[int, NodeSilence]:
        """Returns, by node rank, how long each connected follower has sent nothing."""
        now = time.monotonic()
        return {
            follower.node_rank: NodeSilence(follower.host, now - follower.connection.received_at)
            for follower in self._all()
            if follower.connection.is_open
        }

    def send_stop(self, decision: StopDecision) -> None:
        """Tells the followers to end their ranks."""
        for follower in self._all():
            follower.connection.send({"type": "stop", **decision._asdict()})

    def receive_dumps(self, timeout_s: float) -> dict[str, str]:
        """Returns the stacks and tracebacks of the followers; waits for them for at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        connected = [follower for follower in self._all() if follower.connection.is_open]
        while time.monotonic() < deadline and any(
            follower.dumps is None and follower.connection.is_open for follower in connected
        ):
            time.sleep(_POLL_S)
        return {name: text for follower in connected for name, text in (follower.dumps or {}).items()}

    def close(self) -> None:
        """Tells the followers that this monitor exits, and closes the connections."""
        for follower in self._all():
            follower.connection.send({"type": "goodbye"})
            follower.connection.close()
        with contextlib.suppress(OSError):
            # Without shutdown, the port stays taken until the thread in accept() returns.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _all(self) -> list[_FollowerState]:
        with self._lock:
            return list(self._followers.values())

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return  # the listener is closed
            try:
                connection = Connection(accepted)
            except OSError:
                continue  # the peer has closed the connection already
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Receives all messages of one connection."""
        hello = connection.receive()
        if hello is None or hello.get("type") != "hello" or hello.get("run_id") != self._config.run_id:
            connection.close()
            return
        try:
            follower = _FollowerState(connection, int(hello["node"]), str(hello["host"]))
        except INVALID_MESSAGE_ERRORS as error:
            _log.warning("a monitor sent an invalid first message and was disconnected: %r", error)
            connection.close()
            return
        with self._lock:
            self._followers[follower.node_rank] = follower
        connection.send({"type": "keepalive"})
        try:
            self._receive_from(follower)
        except INVALID_MESSAGE_ERRORS as error:
            _log.warning(
                "node %d (host %s): its monitor sent an invalid message and was disconnected: %r",
                follower.node_rank,
                follower.host,
                error,
            )
            connection.close()

    def _receive_from(self, follower: _FollowerState) -> None:
        connection = follower.connection
        while (message := connection.receive()) is not None:
            if message["type"] == "views":
                follower.views = [view_from_json(view) for view in message["views"]]
                follower.views_at = connection.received_at
            elif message["type"] == "dumps":
                follower.dumps = {str(name): str(text) for name, text in message["dumps"].items()}
            elif message["type"] == "goodbye":
                connection.close()
                return
        if not connection.received_goodbye:
            _log.warning(
                "node %d (host %s): lost the connection to its monitor; its ranks continue, but node 0 cannot see them",
                follower.node_rank,
                follower.host,
            )


def _listen_on(port: int) -> socket.socket:
    """Listens on all IPv4 addresses, and on all IPv6 addresses if the machine has IPv6."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _aged(view: ProcessView, seconds: float) -> ProcessView:
    """Returns a view with its ages advanced by some seconds."""
    ended_s = view.ended_s + seconds if view.state.has_ended else 0.0
    return replace(view, age_s=view.age_s + seconds, ended_s=ended_s)
