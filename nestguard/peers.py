"""Monitors of several nodes that talk to each other, so that there is one table of all ranks.

The monitor of node 0 listens, the others tell it what they see, and it decides for all. Lines of JSON over TCP; ages
travel as ages, for clocks of different machines have nothing in common. Whoever cannot be reached or has hung up is
left out, and every node can still judge by itself: this makes tables better and never a run worse.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nestguard.errors import GuardError
from nestguard.process import ProcessState
from nestguard.record import Identity
from nestguard.verdict import Silence
from nestguard.view import ProcessView
from nestguard.wire import Line, view_from_json, view_to_json

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_BIND_S = 10.0
"""For the monitor of an attempt before to give its port back."""

_LISTENS_S = 5.0
"""Who has said nothing for so long is told nothing either: what it does not read would fill the connection."""


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Where the monitors of several nodes meet."""

    host: str
    """Name or address of node 0."""

    port: int
    """On which its monitor listens."""

    run_id: str = ""
    """Tells runs apart that meet at the same place: others are not listened to."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise GuardError(f"peers.port is {self.port}: expected a port from 1 to 65535.")


class Stop(NamedTuple):
    """A decision to stop."""

    report: dict[str, Any]
    """As `Report.to_json` gives it."""

    table: str

    def culprits(self) -> set[str]:
        """The names of those who are to blame."""
        return {process["name"] for process in self.report["processes"] if process["is_culprit"]}

    def reason_of(self, name: str) -> str:
        """The verdict on one process, in a line."""
        for process in self.report["processes"]:
            if process["name"] == name:
                return f"{name}, {process['verdict']}: {process['reason']}"
        return str(self.report["cause"])


class LocalOnly:
    """The only node."""

    def tell(self, views: Sequence[ProcessView]) -> None:
        """Nobody is to be told."""

    def views(self) -> list[ProcessView]:
        """Nothing is known of others."""
        return []

    def silences(self) -> dict[int, Silence]:
        """Nobody is silent."""
        return {}

    def out_of_touch_s(self) -> float:
        """Seconds since this node lost touch with those that nothing else is known of; 0 where there never was any."""
        return 0.0

    def leaves_judging(self) -> bool:
        """Whether another node judges."""
        return False

    def decision(self) -> Stop | None:
        """There is none but one's own."""
        return None

    def stop(self, stop: Stop) -> None:
        """Tells others to end their ranks."""

    def send_texts(self, texts: Mapping[str, str]) -> None:
        """Sends stacks to whoever decided."""

    def texts(self, seconds: float) -> dict[str, str]:  # noqa: ARG002
        """Stacks of others."""
        return {}

    def close(self) -> None:
        """Says goodbye."""


class _Peer:
    """Another node, as node 0 knows it."""

    def __init__(self, line: Line, node: int, host: str) -> None:
        self.line = line
        self.node = node
        self.host = host
        self.views: list[ProcessView] = []
        self.told = line.heard
        self.texts: dict[str, str] | None = None


class Coordinator(LocalOnly):
    """The side of node 0.

    Raises:
        OSError: The port cannot be listened on.
    """

    def __init__(self, config: PeerConfig) -> None:
        self._config = config
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        self._listener = _listen_on(config.port)
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, views: Sequence[ProcessView]) -> None:  # noqa: ARG002
        """Lets the others know that this monitor is there."""
        for peer in self._all():
            peer.line.send({"type": "here"})

    def views(self) -> list[ProcessView]:
        """What the others said last, as old as it is by now; the ranks of those that have hung up are unseen."""
        now = time.monotonic()
        found = []
        for peer in self._all():
            told = [_later(view, now - peer.told) for view in peer.views]
            if not peer.line.is_open and not peer.line.said_goodbye:
                gone_s = now - peer.line.closed
                told = [replace(view, state=ProcessState.UNSEEN, ended_s=gone_s) for view in told if view.is_rank]
            found += told
        return found

    def silences(self) -> dict[int, Silence]:
        """How long those that are connected have said nothing."""
        now = time.monotonic()
        return {peer.node: Silence(peer.host, now - peer.line.heard) for peer in self._all() if peer.line.is_open}

    def stop(self, stop: Stop) -> None:
        """Tells the others to end their ranks."""
        for peer in self._all():
            peer.line.send({"type": "stop", **stop._asdict()})

    def texts(self, seconds: float) -> dict[str, str]:
        """Stacks of the others, for which it waits so long."""
        deadline = time.monotonic() + seconds
        asked = [peer for peer in self._all() if peer.line.is_open]
        while any(peer.texts is None and peer.line.is_open for peer in asked) and time.monotonic() < deadline:
            time.sleep(0.05)
        return {name: text for peer in asked for name, text in (peer.texts or {}).items()}

    def close(self) -> None:
        """Says goodbye to all."""
        for peer in self._all():
            peer.line.send({"type": "goodbye"})
            peer.line.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or the port stays taken for as long as a thread listens
        self._listener.close()

    def _all(self) -> list[_Peer]:
        with self._lock:
            return list(self._peers.values())

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                line = Line(connection)
            except OSError:
                return
            threading.Thread(target=self._hear, args=(line,), daemon=True).start()

    def _hear(self, line: Line) -> None:
        hello = line.receive()
        if hello is None or hello.get("type") != "hello" or hello.get("run_id") != self._config.run_id:
            line.close()
            return
        peer = _Peer(line, int(hello["node"]), str(hello["host"]))
        with self._lock:
            self._peers[peer.node] = peer
        line.send({"type": "here"})
        try:
            self._follow(peer)
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("the monitor of node %d (%s) is not understood: %r", peer.node, peer.host, error)
            line.close()

    def _follow(self, peer: _Peer) -> None:
        line = peer.line
        while (message := line.receive()) is not None:
            if message["type"] == "views":
                peer.views, peer.told = [view_from_json(view) for view in message["views"]], line.heard
            elif message["type"] == "texts":
                peer.texts = message["texts"]
            elif message["type"] == "goodbye":
                line.close()
                return
        if not line.said_goodbye:
            _log.warning(
                "the monitor of node %d (%s) has hung up: its ranks go on, out of sight",
                peer.node,
                peer.host,
            )


def _listen_on(port: int) -> socket.socket:
    """Listens on all addresses, those of IPv6 too where there are any."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class Follower(LocalOnly):
    """The side of any other node: tells what it sees, and does what node 0 decides while it is connected."""

    def __init__(self, config: PeerConfig, identity: Identity, patience_s: float) -> None:
        self._config = config
        self._identity = identity
        self._line: Line | None = None
        self._decision: Stop | None = None
        self._is_closed = False
        threading.Thread(target=self._talk, args=(time.monotonic() + patience_s,), daemon=True).start()

    def tell(self, views: Sequence[ProcessView]) -> None:
        """Tells node 0 what is seen here."""
        if self._line is not None and time.monotonic() - self._line.heard < _LISTENS_S:
            self._line.send({"type": "views", "views": [view_to_json(view) for view in views]})

    def silences(self) -> dict[int, Silence]:
        """How long node 0 has said nothing, while connected."""
        line = self._line
        if line is None or not line.is_open:
            return {}
        return {0: Silence(self._config.host, time.monotonic() - line.heard)}

    def out_of_touch_s(self) -> float:
        """Seconds since node 0 has hung up."""
        line = self._line
        return 0.0 if line is None or line.is_open or line.said_goodbye else time.monotonic() - line.closed

    def leaves_judging(self) -> bool:
        """Whether node 0 is there to judge."""
        return self._line is not None and self._line.is_open

    def decision(self) -> Stop | None:
        """What node 0 has decided."""
        return self._decision

    def send_texts(self, texts: Mapping[str, str]) -> None:
        """Sends stacks to node 0."""
        if self._line is not None:
            self._line.send({"type": "texts", "texts": dict(texts)})

    def close(self) -> None:
        """Says goodbye."""
        self._is_closed = True
        if self._line is not None:
            self._line.send({"type": "goodbye"})
            self._line.close()

    def _talk(self, deadline: float) -> None:
        identity = self._identity
        hello = {"type": "hello", "run_id": self._config.run_id, "node": identity.node_rank, "host": identity.host}
        while (line := self._connect(deadline)) is not None:
            line.send(hello)
            message = line.receive()
            if message is not None:
                break
            if time.monotonic() > deadline:
                _log.warning("node 0 (%s:%d) is the monitor of another run", self._config.host, self._config.port)
                return
            time.sleep(_RETRY_S)  # for the monitor of an attempt before to end
        if line is None:
            return
        self._line = line
        while message is not None:
            if message["type"] == "stop":
                self._decision = Stop(message["report"], message["table"])
            elif message["type"] == "goodbye":
                line.close()
                return
            message = line.receive()
        if not self._is_closed and self._decision is None:
            _log.warning("the monitor of node 0 (%s) has hung up: each node is on its own", self._config.host)

    def _connect(self, deadline: float) -> Line | None:
        while not self._is_closed:
            try:
                return Line(socket.create_connection((self._config.host, self._config.port), timeout=5))
            except OSError as error:
                if time.monotonic() > deadline:
                    _log.warning(
                        "the monitor of node 0 (%s:%d) cannot be reached, each node is on its own: %s",
                        self._config.host,
                        self._config.port,
                        error,
                    )
                    return None
            time.sleep(_RETRY_S)
        return None


def meet(config: PeerConfig | None, identity: Identity, patience_s: float) -> LocalOnly:
    """Returns the side of this node; `LocalOnly` where it cannot take part, with a warning."""
    if config is None:
        return LocalOnly()
    if identity.node_rank > 0:
        return Follower(config, identity, patience_s)
    deadline = time.monotonic() + _BIND_S
    while True:
        try:
            return Coordinator(config)
        except OSError as error:
            if time.monotonic() > deadline:
                told = "port %d cannot be listened on, so each node has a table of its own: %s"
                _log.warning(told, config.port, error)
                return LocalOnly()
        time.sleep(_RETRY_S / 4)


def _later(view: ProcessView, seconds: float) -> ProcessView:
    ended_s = view.ended_s + seconds if view.state.has_ended else 0.0
    return replace(view, age_s=view.age_s + seconds, ended_s=ended_s)
