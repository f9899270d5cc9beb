"""Role of the monitor of every node but node 0: it sends what it observes and follows the decisions made there."""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NamedTuple

from nestguard.connect.authentication import AuthenticationError, Handshake, Seal, SharedToken, Side, new_nonce
from nestguard.connect.frames import SIZE, Codec, InvalidFrameError, Message, pack
from nestguard.connect.messages import INVALID_MESSAGE_ERRORS, UpdateEncoder, encode_details
from nestguard.connect.peers import LocalOnly, PeerConfig, StopDecision
from nestguard.observe.view import Identity, NodeSilence, ProcessView

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_CONNECT_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 2
_MAX_SEND_SILENCE_S = 5.0
"""Views are not sent to a coordinator that has been silent for longer: unread messages would fill the send buffer."""


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


class _Link(NamedTuple):
    """The connection to a coordinator that has proved itself, and the encoder of the updates sent on it."""

    connection: Connection
    encoder: UpdateEncoder


class Follower(LocalOnly):
    """Role of the monitor of every node but node 0. It decides for its own node while it is not connected.

    Args:
        config: Where the coordinator listens.
        identity: Identity of the rank that started this monitor.
        connect_timeout_s: For how long it tries to connect; a warning is logged after that.
        token: The run token. It does not connect before the token is known.
    """

    def __init__(self, config: PeerConfig, identity: Identity, connect_timeout_s: float, token: SharedToken) -> None:
        self._config = config
        self._identity = identity
        self._token = token
        self._link: _Link | None = None
        self._observed: tuple[Sequence[ProcessView], float] = ((), 0.0)
        self._decision: StopDecision | None = None
        self._is_closed = False
        self._has_met_stranger = False
        threading.Thread(target=self._run, args=(time.monotonic() + connect_timeout_s,), daemon=True).start()

    def send_views(self, views: Sequence[ProcessView], at_s: float | None = None) -> None:
        """Sends what has changed on this node to the coordinator."""
        at_s = time.monotonic() if at_s is None else at_s
        self._observed = (views, at_s)
        link = self._link
        if link is not None and time.monotonic() - link.connection.received_at < _MAX_SEND_SILENCE_S:
            link.connection.send(link.encoder.encode(views, at_s))

    def silences(self) -> dict[int, NodeSilence]:
        """Returns how long the coordinator (node 0) has sent nothing; empty while not connected."""
        link = self._link
        if link is None or not link.connection.is_open:
            return {}
        return {0: NodeSilence(self._config.host, time.monotonic() - link.connection.received_at)}

    def disconnected_s(self) -> float:
        """Returns the seconds since the connection to the coordinator was lost; 0 if it never was."""
        link = self._link
        if link is None or link.connection.is_open or link.connection.received_goodbye:
            return 0.0
        return time.monotonic() - link.connection.closed_at

    def has_coordinator(self) -> bool:
        """Returns whether the coordinator is connected."""
        return self._link is not None and self._link.connection.is_open

    def decision(self) -> StopDecision | None:
        """Returns the coordinator's decision to end the run, if there is one."""
        return self._decision

    def send_dumps(self, dumps: Mapping[str, str]) -> None:
        """Sends stacks and tracebacks, by file name, to the coordinator."""
        if self._link is not None:
            self._link.connection.send({"type": "dumps", "dumps": dict(dumps)})

    def close(self) -> None:
        """Tells the coordinator that this monitor exits, and closes the connection."""
        self._is_closed = True
        if self._link is not None:
            self._link.connection.send({"type": "goodbye"})
            self._link.connection.close()

    def _run(self, deadline: float) -> None:
        """Connects to the coordinator, then receives its messages until the connection is closed."""
        if self._token.wait(deadline - time.monotonic()) is None:
            self._warn(
                "cannot connect to its monitor, because the token of the run is not known; each node decides for itself"
            )
            return
        connection = self._join(deadline)
        if connection is None:
            return
        self._link = _Link(connection, UpdateEncoder())
        try:
            self._receive_from(connection)
        except INVALID_MESSAGE_ERRORS as error:
            self._warn(f"its monitor sent an invalid message and was disconnected: {error!r}")
            connection.close()

    def _receive_from(self, connection: Connection) -> None:
        while (message := connection.receive()) is not None:
            if message["type"] == "stop":
                decision = StopDecision(message["report"], str(message["table"]))
                decision.culprits()  # raises here, not while ranks are ended, if the report is malformed
                self._decision = decision
            elif message["type"] == "details":
                connection.send(encode_details(*self._observed))
            elif message["type"] == "goodbye":
                connection.close()
                return
        if not self._is_closed and self._decision is None:
            self._warn("lost the connection to its monitor; each node now decides for itself")

    def _join(self, deadline: float) -> Connection | None:
        """Connects until a coordinator of the same run answers; returns None if there was no answer by the deadline."""
        while (connection := self._connect(deadline)) is not None:
            if self._authenticate(connection):
                return connection
            connection.close()
            if time.monotonic() > deadline:
                self._cannot_connect("the port is used by another run, or with another token")
                return None
            # The monitor of an earlier attempt may still hold the port, or the coordinator does not know the token yet.
            time.sleep(_RETRY_S)
        return None

    def _connect(self, deadline: float) -> Connection | None:
        while not self._is_closed:
            try:
                address = (self._config.host, self._config.port)
                return Connection(socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S))
            except OSError as error:
                if time.monotonic() > deadline:
                    self._cannot_connect(str(error))
                    return None
            time.sleep(_RETRY_S)
        return None

    def _authenticate(self, connection: Connection) -> bool:
        """Proves to the coordinator that this monitor belongs to the run, and has the coordinator prove the same."""
        challenge = connection.receive()
        token = self._token.get()
        if challenge is None or token is None:
            return False
        own = self._identity
        handshake = Handshake(
            self._config.run_id, own.node_rank, own.host, str(challenge.get("nonce")), follower_nonce=new_nonce()
        )
        connection.send(
            {
                "type": "hello",
                "run_id": handshake.run_id,
                "node": handshake.node_rank,
                "host": handshake.host,
                "nonce": handshake.follower_nonce,
                "proof": handshake.proof(token, Side.FOLLOWER),
            }
        )
        welcome: Message | None = connection.receive()
        if welcome is None:
            return False
        if not handshake.is_proof(welcome.get("proof"), token, Side.COORDINATOR):
            if not self._has_met_stranger:
                self._has_met_stranger = True
                self._warn("what listens on its port did not prove that it belongs to this run; it is ignored")
            return False
        connection.authenticate(
            sending=handshake.seal(token, Side.FOLLOWER), receiving=handshake.seal(token, Side.COORDINATOR)
        )
        return True

    def _cannot_connect(self, reason: str) -> None:
        host, port = self._config.host, self._config.port
        _log.warning(
            "cannot connect to the monitor of node 0 (%s:%d); each node decides for itself: %s", host, port, reason
        )

    def _warn(self, text: str) -> None:
        _log.warning("node 0 (host %s): %s", self._config.host, text)
