"""Role of the monitor of every node but node 0: it sends what it observes and follows the decisions made there."""

import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from nestguard.peers import LocalOnly, PeerConfig, StopDecision
from nestguard.record import Identity
from nestguard.view import NodeSilence, ProcessView
from nestguard.wire import INVALID_MESSAGE_ERRORS, Connection, Message, view_to_json

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_SEND_SILENCE_S = 5.0
"""Views are not sent to a coordinator that has been silent for longer: unread messages would fill the send buffer."""


class Follower(LocalOnly):
    """Role of the monitor of every node but node 0. It decides for its own node while it is not connected.

    Args:
        config: Where the coordinator listens.
        identity: Identity of the rank that started this monitor.
        connect_timeout_s: For how long it tries to connect; a warning is logged after that.
    """

    def __init__(self, config: PeerConfig, identity: Identity, connect_timeout_s: float) -> None:
        self._config = config
        self._identity = identity
        self._connection: Connection | None = None
        self._decision: StopDecision | None = None
        self._is_closed = False
        threading.Thread(target=self._run, args=(time.monotonic() + connect_timeout_s,), daemon=True).start()

    def send_views(self, views: Sequence[ProcessView]) -> None:
        """Sends what this node observes to the coordinator."""
        connection = self._connection
        if connection is not None and time.monotonic() - connection.received_at < _MAX_SEND_SILENCE_S:
            connection.send({"type": "views", "views": [view_to_json(view) for view in views]})

    def silences(self) -> dict[int, NodeSilence]:
        """Returns how long the coordinator (node 0) has sent nothing; empty while not connected."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return {}
        return {0: NodeSilence(self._config.host, time.monotonic() - connection.received_at)}

    def disconnected_s(self) -> float:
        """Returns the seconds since the connection to the coordinator was lost; 0 if it never was."""
        connection = self._connection
        if connection is None or connection.is_open or connection.received_goodbye:
            return 0.0
        return time.monotonic() - connection.closed_at

    def has_coordinator(self) -> bool:
        """Returns whether the coordinator is connected."""
        return self._connection is not None and self._connection.is_open

    def decision(self) -> StopDecision | None:
        """Returns the coordinator's decision to end the run, if there is one."""
        return self._decision

    def send_dumps(self, dumps: Mapping[str, str]) -> None:
        """Sends stacks and tracebacks, by file name, to the coordinator."""
        if self._connection is not None:
            self._connection.send({"type": "dumps", "dumps": dict(dumps)})

    def close(self) -> None:
        """Tells the coordinator that this monitor exits, and closes the connection."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.send({"type": "goodbye"})
            self._connection.close()

    def _run(self, deadline: float) -> None:
        """Connects to the coordinator, then receives its messages until the connection is closed."""
        joined = self._join(deadline)
        if joined is None:
            return
        self._connection, message = joined
        try:
            self._receive_from(self._connection, message)
        except INVALID_MESSAGE_ERRORS as error:
            _log.warning(
                "node 0 (host %s): its monitor sent an invalid message and was disconnected: %r",
                self._config.host,
                error,
            )
            self._connection.close()

    def _receive_from(self, connection: Connection, message: Message | None) -> None:
        while message is not None:
            if message["type"] == "stop":
                decision = StopDecision(message["report"], str(message["table"]))
                decision.culprits()  # raises here, not while ranks are ended, if the report is malformed
                self._decision = decision
            elif message["type"] == "goodbye":
                connection.close()
                return
            message = connection.receive()
        if not self._is_closed and self._decision is None:
            _log.warning(
                "node 0 (host %s): lost the connection to its monitor; each node now decides for itself",
                self._config.host,
            )

    def _join(self, deadline: float) -> tuple[Connection, Message | None] | None:
        """Connects until a coordinator of the same run answers.

        Returns:
            The connection and the first message; None if there was no answer by the deadline.
        """
        identity = self._identity
        hello = {"type": "hello", "run_id": self._config.run_id, "node": identity.node_rank, "host": identity.host}
        while (connection := self._connect(deadline)) is not None:
            connection.send(hello)
            if (message := connection.receive()) is not None:
                return connection, message
            if time.monotonic() > deadline:
                _log.warning(
                    "%s:%d is the monitor of another run; each node decides for itself",
                    self._config.host,
                    self._config.port,
                )
                return None
            # The monitor of an earlier attempt may still hold the port.
            time.sleep(_RETRY_S)
        return None

    def _connect(self, deadline: float) -> Connection | None:
        while not self._is_closed:
            try:
                address = (self._config.host, self._config.port)
                return Connection(socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S))
            except OSError as error:
                if time.monotonic() > deadline:
                    _log.warning(
                        "cannot connect to the monitor of node 0 (%s:%d); each node decides for itself: %s",
                        self._config.host,
                        self._config.port,
                        error,
                    )
                    return None
            time.sleep(_RETRY_S)
        return None
