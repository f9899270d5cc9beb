"""Role of the monitor of every node but node 0: it sends what it observes and follows the decisions made there."""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from nestguard.connect.channel import CLOSED_ERRORS, Channel, Message, pack, run_loop, views_message
from nestguard.connect.peers import Handshake, LocalOnly, PeerConfig, SharedToken, Side, StopDecision
from nestguard.diagnose.stall_limits import StallLimits
from nestguard.observe.view import INVALID_VALUE_ERRORS, Identity, NodeSilence, ProcessView

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_TOKEN_CHECK_S = 0.1
_ANSWER_S = 5.0
"""Time for a connection, and for the handshake after it."""

_CLOSING_S = 2.0
"""How long this monitor waits at its end until all messages are sent."""


class Follower(LocalOnly):
    """Role of the monitor of every node but node 0. It decides for its own node while it is not connected.

    Args:
        config: Where the coordinator listens.
        identity: Identity of the rank that started this monitor.
        limits: How long a process may go without a heartbeat. It tries to connect for `first_step_s`, then warns.
        token: The run token. It does not connect before the token is known.
    """

    def __init__(self, config: PeerConfig, identity: Identity, limits: StallLimits, token: SharedToken) -> None:
        self._config = config
        self._identity = identity
        self._limits = limits
        self._token = token
        self._deadline = time.monotonic() + limits.first_step_s
        self._channel: Channel | None = None
        """Connection to a coordinator that has proved that it belongs to the run."""

        self._decision: StopDecision | None = None
        self._received_goodbye = False
        self._is_closed = False
        self._has_warned_of_stranger = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=run_loop, args=(self._loop, self._run()), daemon=True)
        self._thread.start()

    def send_views(self, views: Sequence[ProcessView]) -> None:
        """Sends what is known about this node to the coordinator."""
        if self.has_coordinator():
            self._send(views_message(views, self._limits), only_if_idle=True)

    def silences(self) -> dict[int, NodeSilence]:
        """Returns how long the coordinator (node 0) has sent nothing; empty while not connected."""
        channel = self._channel
        if channel is None or not channel.is_open:
            return {}
        return {0: NodeSilence(self._config.host, time.monotonic() - channel.received_at)}

    def disconnected_s(self) -> float:
        """Returns the seconds since the connection to the coordinator was lost; 0 if it never was."""
        channel = self._channel
        if channel is None or channel.is_open or self._received_goodbye:
            return 0.0
        return time.monotonic() - channel.closed_at

    def has_coordinator(self) -> bool:
        """Returns whether the coordinator is connected."""
        return self._channel is not None and self._channel.is_open

    def decision(self) -> StopDecision | None:
        """Returns the coordinator's decision to end the run, if there is one."""
        return self._decision

    def send_dumps(self, dumps: Mapping[str, str]) -> None:
        """Sends stacks and tracebacks, by file name, to the coordinator."""
        self._send({"type": "dumps", "dumps": dict(dumps)})

    def close(self) -> None:
        """Tells the coordinator that this monitor exits, and closes the connection."""
        self._is_closed = True
        self._send({"type": "goodbye"})
        if self._channel is not None:
            self._call(self._channel.close)
        self._thread.join(_CLOSING_S)

    def _send(self, message: Message, *, only_if_idle: bool = False) -> None:
        channel = self._channel
        if channel is not None:
            packed = pack(message)
            self._call(lambda: channel.send(packed, only_if_idle=only_if_idle))

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    # What follows runs in the thread of the event loop.

    async def _run(self) -> None:
        """Connects to the coordinator, then receives its messages until the connection is closed."""
        while self._token.get() is None:
            if self._is_closed:
                return
            if time.monotonic() > self._deadline:
                self._warn("cannot connect, because the token of the run is not known; each node decides for itself")
                return
            await asyncio.sleep(_TOKEN_CHECK_S)
        channel = await self._join()
        if channel is None:
            return
        self._channel = channel
        try:
            while not self._received_goodbye:
                self._handle(await channel.receive())
        except CLOSED_ERRORS:
            if not self._is_closed and self._decision is None:
                self._warn("lost the connection to its monitor; each node now decides for itself")
        except INVALID_VALUE_ERRORS as error:
            self._warn(f"its monitor sent an invalid message and was disconnected: {error!r}")
        channel.close()
        await channel.wait_closed()

    def _handle(self, message: Message) -> None:
        if message["type"] == "stop":
            decision = StopDecision(message["report"], str(message["table"]))
            decision.culprits()  # raises here, not while ranks are ended, if the report is malformed
            self._decision = decision
        elif message["type"] == "goodbye":
            self._received_goodbye = True

    async def _join(self) -> Channel | None:
        """Tries until a coordinator of the same run answers; returns None if none has by the deadline."""
        host, port = self._config.host, self._config.port
        while not self._is_closed:
            reason = "the port is used by another run, or with another token"
            try:
                async with asyncio.timeout(_ANSWER_S):
                    channel = Channel(*await asyncio.open_connection(host, port))
                if await self._authenticate(channel):
                    return channel
                channel.close()
            except (TimeoutError, OSError) as error:
                reason = str(error) or "no answer"
            if time.monotonic() > self._deadline:
                _log.warning(
                    "cannot connect to the monitor of node 0 (%s:%d); each node decides for itself: %s",
                    host,
                    port,
                    reason,
                )
                return None
            # The monitor of an earlier attempt may still hold the port, or the coordinator does not know the token yet.
            await asyncio.sleep(_RETRY_S)
        return None

    async def _authenticate(self, channel: Channel) -> bool:
        """Performs the handshake; returns whether both sides belong to the run."""
        own, token = self._identity, self._token.get()
        assert token is not None
        try:
            async with asyncio.timeout(_ANSWER_S):
                nonce = str((await channel.receive())["nonce"])
                handshake = Handshake(self._config.run_id, own.node_rank, own.host, nonce, secrets.token_hex(16))
                proof = handshake.proof(token, Side.FOLLOWER)
                hello = {"node": own.node_rank, "host": own.host, "nonce": handshake.follower_nonce, "proof": proof}
                channel.send(pack({"type": "hello", **hello}))
                welcome = await channel.receive()
        except (TimeoutError, *CLOSED_ERRORS, *INVALID_VALUE_ERRORS):
            return False
        if not handshake.is_proof(welcome.get("proof"), token, Side.COORDINATOR):
            if not self._has_warned_of_stranger:
                self._has_warned_of_stranger = True
                self._warn("the process on its port did not prove that it belongs to this run; it is ignored")
            return False
        channel.trust()
        return True

    def _warn(self, text: str) -> None:
        _log.warning("node 0 (host %s): %s", self._config.host, text)
