"""Role of the monitor of node 0: it receives what all other monitors observe and decides for the whole run."""

import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from nestguard.connect.authentication import AuthenticationError, Handshake, SharedToken, Side, new_nonce
from nestguard.connect.frames import InvalidFrameError, Message, pack
from nestguard.connect.listening import allow_open_files, listen
from nestguard.connect.messages import INVALID_MESSAGE_ERRORS, NodeRanks, aged, view_from_json
from nestguard.connect.peers import LocalOnly, PeerConfig, StopDecision
from nestguard.connect.server import Peer, Server
from nestguard.diagnose.limits import StallLimits, quick_limits
from nestguard.observe.view import Identity, NodeSilence, ProcessState, ProcessView

_log = logging.getLogger(__name__)
_MAX_LOGGED_STRANGERS = 100
_DETAILS_SILENCE_S = 3.0
"""A node that has been silent for longer is not asked for details: it would probably not answer."""

_KEEPALIVE = pack({"type": "keepalive"})
_GOODBYE = pack({"type": "goodbye"})
_DETAILS = pack({"type": "details"})


class _FollowerState:
    """Connection to a follower, and what the follower has sent."""

    def __init__(self, peer: Peer, node_rank: int, host: str) -> None:
        self.peer = peer
        self.node_rank = node_rank
        self.host = host
        self.received_goodbye = False
        self.ranks = NodeRanks()
        self.details: list[ProcessView] | None = None
        self.details_at = 0.0
        self.dumps: dict[str, str] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the connection was lost."""
        return not self.peer.is_open and not self.received_goodbye

    def views(self, now: float) -> list[ProcessView]:
        """Returns the ranks of the node. They are unseen if the connection was lost."""
        views = list(self.ranks.views(now))
        if not self.is_lost:
            return views
        lost_s = now - self.peer.closed_at
        return [replace(view, state=ProcessState.UNSEEN, ended_s=lost_s) for view in views]

    def detailed_views(self, now: float) -> list[ProcessView]:
        """Returns the processes of the node as its details describe them; the ranks alone without details."""
        if self.details is None or not self.peer.is_open:
            return self.views(now)
        return [aged(view, now - self.details_at) for view in self.details]


class Coordinator(LocalOnly):
    """Role of the monitor of node 0.

    Args:
        config: Where it listens; see `listen`.
        identity: Identity of the rank that started this monitor.
        token: The run token. Nobody is accepted before it is known.

    Raises:
        OSError: The name of node 0 cannot be resolved, or the port is taken or may not be used.
    """

    def __init__(self, config: PeerConfig, identity: Identity, token: SharedToken) -> None:
        self._config = config
        self._token = token
        self._followers: dict[int, _FollowerState] = {}
        self._follower_of: dict[Peer, _FollowerState] = {}
        self._nonces: dict[Peer, str] = {}
        self._strangers: set[str] = set()
        self._is_closing = False
        self._changed = threading.Condition()
        """Held while followers are read or changed; notified when details or dumps arrive."""

        num_nodes = identity.world_size // identity.local_world_size
        allow_open_files()
        self._server = Server(listen(config.host, config.port), self, max_waiting=64 + 2 * num_nodes)
        self._server.start()

    def send_views(self, views: Sequence[ProcessView], at_s: float | None = None) -> None:  # noqa: ARG002
        """Tells the followers that this monitor is alive. They do not need its views."""
        for follower in self._all():
            if not follower.peer.has_unsent:
                follower.peer.send(_KEEPALIVE)

    def may_stop_run(self, limits: StallLimits) -> bool:
        """Returns whether a rank of another node may be a reason to stop the run."""
        limits = quick_limits(limits, self.silences())
        now = time.monotonic()
        with self._changed:
            return any(
                follower.ranks.may_stop_run(limits, now, is_lost=follower.is_lost)
                for follower in self._followers.values()
            )

    def views(self) -> list[ProcessView]:
        """Returns the ranks of the followers, with their ages advanced to now, but without their cuts.

        The ranks of a node whose connection was lost are unseen.
        """
        now = time.monotonic()
        with self._changed:
            return [view for follower in self._followers.values() for view in follower.views(now)]

    def detailed_views(self, nodes: Collection[int], timeout_s: float) -> list[ProcessView]:
        """Returns the ranks of the followers and, for some nodes, also their loader workers and cuts.

        Args:
            nodes: Node ranks of those that are asked for details.
            timeout_s: For how long it waits for the details, in seconds.
        """
        asked = [follower for follower in self._all() if follower.node_rank in nodes and self._answers(follower)]
        for follower in asked:
            follower.details = None
            follower.peer.send(_DETAILS)
        with self._changed:
            self._changed.wait_for(
                lambda: all(follower.details is not None or not follower.peer.is_open for follower in asked), timeout_s
            )
            now = time.monotonic()
            return [
                view
                for follower in self._followers.values()
                for view in (follower.detailed_views(now) if follower in asked else follower.views(now))
            ]

    def silences(self) -> dict[int, NodeSilence]:
        """Returns, by node rank, how long each connected follower has sent nothing."""
        now = time.monotonic()
        return {
            follower.node_rank: NodeSilence(follower.host, now - follower.peer.received_at)
            for follower in self._all()
            if follower.peer.is_open
        }

    def send_stop(self, decision: StopDecision) -> None:
        """Tells the followers to end their ranks. Their report lists no loader workers except culprits."""
        payload = pack({"type": "stop", "report": _ranks_and_culprits(decision.report), "table": decision.table})
        for follower in self._all():
            follower.peer.send(payload)

    def receive_dumps(self, timeout_s: float) -> dict[str, str]:
        """Returns the stacks and tracebacks of the followers; waits for them for at most `timeout_s` seconds."""
        connected = [follower for follower in self._all() if follower.peer.is_open]
        with self._changed:
            self._changed.wait_for(
                lambda: all(follower.dumps is not None or not follower.peer.is_open for follower in connected),
                timeout_s,
            )
            return {name: text for follower in connected for name, text in (follower.dumps or {}).items()}

    def close(self) -> None:
        """Tells the followers that this monitor exits, and closes the connections."""
        self._is_closing = True
        for follower in self._all():
            follower.peer.send(_GOODBYE)
        self._server.close()

    def _all(self) -> list[_FollowerState]:
        with self._changed:
            return list(self._followers.values())

    def _answers(self, follower: _FollowerState) -> bool:
        return follower.peer.is_open and time.monotonic() - follower.peer.received_at < _DETAILS_SILENCE_S

    # The server calls the following methods in its own thread.

    def opened(self, peer: Peer) -> None:
        """Sends the nonce that the peer has to use in its proof."""
        self._nonces[peer] = new_nonce()
        peer.send(pack({"type": "challenge", "nonce": self._nonces[peer]}))

    def received(self, peer: Peer, frame: bytes) -> None:
        """Handles the next message of a follower, or the first one of a peer that is not accepted yet."""
        follower = self._follower_of.get(peer)
        if follower is None:
            self._accept(peer, frame)
            return
        try:
            message = peer.codec.message(frame)
            peer.received_at = time.monotonic()
            with self._changed:
                self._handle(follower, message)
        except INVALID_MESSAGE_ERRORS as error:
            _log.warning(
                "node %d (host %s): its monitor sent an invalid message and was disconnected: %r",
                follower.node_rank,
                follower.host,
                error,
            )
            self._follower_of.pop(peer)  # the loss of this connection needs no second warning
            peer.close()

    def closed(self, peer: Peer, reason: str) -> None:
        """Logs the loss of a follower, or that a stranger was disconnected."""
        is_stranger = self._nonces.pop(peer, None) is not None
        follower = self._follower_of.pop(peer, None)
        with self._changed:
            self._changed.notify_all()
        if self._is_closing:
            return
        if is_stranger:
            self._log_stranger(peer, reason or "it did not prove that it belongs to this run")
        elif follower is not None and not follower.received_goodbye:
            _log.warning(
                "node %d (host %s): lost the connection to its monitor; its ranks continue, but node 0 cannot see them",
                follower.node_rank,
                follower.host,
            )

    def _accept(self, peer: Peer, frame: bytes) -> None:
        """Accepts a peer as a follower if it proves that it belongs to this run; disconnects it otherwise."""
        nonce = self._nonces.pop(peer)
        token = self._token.get()
        if token is None:
            peer.close()  # it may belong to the run; it tries again
            return
        try:
            handshake, proof = self._hello(peer, frame, nonce)
            if not handshake.is_proof(proof, token, Side.FOLLOWER):
                raise AuthenticationError("it did not prove that it belongs to this run")
        except INVALID_MESSAGE_ERRORS as error:
            text = str(error) if isinstance(error, AuthenticationError | InvalidFrameError) else repr(error)
            self._log_stranger(peer, text)
            peer.close()
            return
        peer.send(pack({"type": "welcome", "proof": handshake.proof(token, Side.COORDINATOR)}))
        peer.codec.authenticate(
            sending=handshake.seal(token, Side.COORDINATOR), receiving=handshake.seal(token, Side.FOLLOWER)
        )
        peer.is_accepted = True
        self._add(_FollowerState(peer, handshake.node_rank, handshake.host))

    def _hello(self, peer: Peer, frame: bytes, nonce: str) -> tuple[Handshake, Any]:
        """Returns what a peer says about itself, and its proof; raises one of `INVALID_MESSAGE_ERRORS`."""
        message = peer.codec.message(frame)
        if message["run_id"] != self._config.run_id:
            raise AuthenticationError("it belongs to another run")
        node, host, other_nonce = message["node"], message["host"], message["nonce"]
        if not isinstance(node, int) or not isinstance(host, str) or not isinstance(other_nonce, str):
            raise TypeError("an invalid first message")
        return Handshake(self._config.run_id, node, host, nonce, other_nonce), message["proof"]

    def _add(self, follower: _FollowerState) -> None:
        with self._changed:
            replaced = self._followers.get(follower.node_rank)
            self._followers[follower.node_rank] = follower
        self._follower_of[follower.peer] = follower
        if replaced is not None:
            self._follower_of.pop(replaced.peer, None)
            replaced.peer.close()
        follower.peer.send(_KEEPALIVE)

    def _handle(self, follower: _FollowerState, message: Message) -> None:
        peer = follower.peer
        if message["type"] == "update":
            follower.ranks.apply(message, peer.received_at)
        elif message["type"] == "details":
            follower.details = [view_from_json(view) for view in message["views"]]
            follower.details_at = peer.received_at
            self._changed.notify_all()
        elif message["type"] == "dumps":
            follower.dumps = {str(name): str(text) for name, text in message["dumps"].items()}
            self._changed.notify_all()
        elif message["type"] == "goodbye":
            follower.received_goodbye = True
            peer.close()

    def _log_stranger(self, peer: Peer, reason: str) -> None:
        """Logs the first refused connection of each address."""
        if peer.address in self._strangers or len(self._strangers) >= _MAX_LOGGED_STRANGERS:
            return
        self._strangers.add(peer.address)
        _log.warning(
            "refused a connection from %s to port %d: %s. It is ignored; further ones from there are not logged",
            peer.address,
            self._config.port,
            reason,
        )


def _ranks_and_culprits(report: dict[str, Any]) -> dict[str, Any]:
    processes = [process for process in report["processes"] if process.get("worker") is None or process["is_culprit"]]
    return {**report, "processes": processes}
