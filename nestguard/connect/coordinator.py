"""Role of the monitor of node 0: it receives what all other monitors observe and decides for the whole run."""

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from nestguard.connect.channel import (
    CLOSED_ERRORS,
    Channel,
    InvalidMessageError,
    Message,
    aged,
    pack,
    run_loop,
    views_of,
)
from nestguard.connect.peers import Handshake, LocalOnly, PeerConfig, SharedToken, Side, StopDecision
from nestguard.observe.view import INVALID_VALUE_ERRORS, Identity, NodeSilence, ProcessState, ProcessView

_log = logging.getLogger(__name__)
HANDSHAKE_S = 10.0
"""Time in which a peer has to prove that it belongs to the run."""

_BACKLOG = 4096
_CLOSING_S = 1.0
"""How long this monitor waits at its end until all messages are sent."""

_KEEPALIVE = pack({"type": "keepalive"})
_GOODBYE = pack({"type": "goodbye"})


class _FollowerState:
    """Connection to a follower, and what the follower has sent."""

    def __init__(self, channel: Channel, node_rank: int, host: str) -> None:
        self.channel = channel
        self.node_rank = node_rank
        self.host = host
        self.received_goodbye = False
        self.processes: list[ProcessView] = []
        """The processes of its node, as in its last message."""

        self.dumps: dict[str, str] | None = None

    def views(self, now: float) -> list[ProcessView]:
        """Returns the processes of the node, their ages advanced to now; unseen ones if the connection was lost."""
        views = [aged(view, max(0.0, now - self.channel.received_at)) for view in self.processes]
        if self.channel.is_open:
            return views
        # A monitor may end its ranks after its goodbye, so that only their final phases are certain.
        lost_s = now - self.channel.closed_at
        return [
            view
            if self.received_goodbye and view.reading.phase.is_final
            else replace(view, state=ProcessState.UNSEEN, ended_s=lost_s)
            for view in views
            if view.is_rank
        ]


class Coordinator(LocalOnly):
    """Role of the monitor of node 0. One thread with an event loop does all input and output.

    Args:
        config: Where it listens: at all addresses of this machine, because the name of node 0 may mean another one on
            another node; or only at loopback, if that is the name.
        identity: Identity of the rank that started this monitor.
        token: The run token. No follower is accepted before it is known.

    Raises:
        OSError: The port is taken or may not be used.
    """

    def __init__(self, config: PeerConfig, identity: Identity, token: SharedToken) -> None:
        self._config = config
        self._token = token
        self._followers: dict[int, _FollowerState] = {}
        self._waiting: list[Channel] = []
        """Connections without a proof so far, the oldest first."""

        # Strangers that connect must not keep the monitors of the run out.
        self._max_waiting = 64 + 2 * identity.world_size // identity.local_world_size
        self._strangers: set[str] = set()
        self._changed = threading.Condition()
        """Held while followers are read or changed; notified when dumps arrive or a connection ends."""

        self._listener = _listen(config.host, config.port)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=run_loop, args=(self._loop, self._serve()), daemon=True)
        self._thread.start()

    def send_views(self, views: Sequence[ProcessView]) -> None:  # noqa: ARG002
        """Tells the followers that this monitor is alive. They do not need its views."""
        self._send_to_all(_KEEPALIVE, only_if_idle=True)

    def views(self) -> list[ProcessView]:
        """Returns the processes of the other nodes, as far as their followers have sent them.

        The ranks of a node whose connection was lost are unseen.
        """
        now = time.monotonic()
        with self._changed:
            return [view for follower in self._followers.values() for view in follower.views(now)]

    def silences(self) -> dict[int, NodeSilence]:
        """Returns, by node rank, how long each connected follower has sent nothing."""
        now = time.monotonic()
        with self._changed:
            return {
                follower.node_rank: NodeSilence(follower.host, now - follower.channel.received_at)
                for follower in self._followers.values()
                if follower.channel.is_open
            }

    def send_stop(self, decision: StopDecision) -> None:
        """Tells the followers to end their ranks."""
        self._send_to_all(pack({"type": "stop", "report": decision.report, "table": decision.table}))

    def receive_dumps(self, timeout_s: float) -> dict[str, str]:
        """Returns the stacks and tracebacks of the followers; waits for them for at most `timeout_s` seconds."""
        with self._changed:
            connected = [follower for follower in self._followers.values() if follower.channel.is_open]
            self._changed.wait_for(
                lambda: all(follower.dumps is not None or not follower.channel.is_open for follower in connected),
                timeout_s,
            )
            # A node that has ended its ranks meanwhile has sent its dumps before.
            known = self._followers.values()
            return {name: text for follower in known for name, text in (follower.dumps or {}).items()}

    def close(self) -> None:
        """Tells the followers that this monitor exits, and closes the connections."""
        self._send_to_all(_GOODBYE)
        with contextlib.suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _send_to_all(self, packed: bytes, *, only_if_idle: bool = False) -> None:
        def send() -> None:
            for follower in list(self._followers.values()):
                follower.channel.send(packed, only_if_idle=only_if_idle)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(send)

    # What follows runs in the thread of the event loop.

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._meet, sock=self._listener, backlog=_BACKLOG)
        await self._closing.wait()
        server.close()
        channels = [follower.channel for follower in self._followers.values()]
        for channel in [*channels, *self._waiting]:
            channel.close()
        if channels:
            await asyncio.wait(
                [asyncio.ensure_future(channel.wait_closed()) for channel in channels], timeout=_CLOSING_S
            )

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        self._waiting.append(channel)
        if len(self._waiting) > self._max_waiting:
            self._waiting[0].close()
            del self._waiting[0]
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                follower = await self._accept(channel)
        except (TimeoutError, *CLOSED_ERRORS):
            self._log_stranger(channel, "it did not prove in time that it belongs to this run")
            follower = None
        except INVALID_VALUE_ERRORS as error:
            self._log_stranger(channel, str(error) if isinstance(error, InvalidMessageError) else repr(error))
            follower = None
        finally:
            if channel in self._waiting:
                self._waiting.remove(channel)
        if follower is not None:
            await self._follow(follower)
        channel.close()

    async def _accept(self, channel: Channel) -> _FollowerState | None:
        """Returns a follower that has proved that it belongs to this run; None as long as the token is not known."""
        nonce = secrets.token_hex(16)
        channel.send(pack({"type": "challenge", "nonce": nonce}))
        hello = await channel.receive()
        token = self._token.get()
        if token is None:
            return None  # it may belong to the run; it tries again
        node_rank, host, other_nonce = hello["node"], hello["host"], hello["nonce"]
        handshake = Handshake(self._config.run_id, node_rank, host, nonce, other_nonce)
        if not handshake.is_proof(hello["proof"], token, Side.FOLLOWER):
            raise InvalidMessageError("it did not prove that it belongs to this run")
        channel.trust()
        channel.send(pack({"type": "welcome", "proof": handshake.proof(token, Side.COORDINATOR)}))
        return _FollowerState(channel, node_rank, host)

    async def _follow(self, follower: _FollowerState) -> None:
        """Receives the messages of a follower until its connection ends."""
        with self._changed:
            replaced = self._followers.get(follower.node_rank)
            self._followers[follower.node_rank] = follower
        if replaced is not None:
            replaced.channel.close()
        follower.channel.send(_KEEPALIVE)
        reason = "lost the connection to its monitor; its ranks continue, but node 0 cannot see them"
        try:
            while not follower.received_goodbye:
                message = await follower.channel.receive()
                with self._changed:
                    _handle(follower, message)
                    self._changed.notify_all()
        except CLOSED_ERRORS:
            pass
        except INVALID_VALUE_ERRORS as error:
            reason = f"its monitor sent an invalid message and was disconnected: {error!r}"
        with self._changed:
            follower.channel.close()
            self._changed.notify_all()
        is_current = self._followers.get(follower.node_rank) is follower
        if is_current and not follower.received_goodbye and not self._closing.is_set():
            _log.warning("node %d (host %s): %s", follower.node_rank, follower.host, reason)

    def _log_stranger(self, channel: Channel, reason: str) -> None:
        """Logs the first refused connection of each address."""
        address = channel.address
        if self._closing.is_set() or address in self._strangers:
            return
        self._strangers.add(address)
        _log.warning(
            "refused a connection from %s to port %d: %s; further ones from this address are not logged",
            address,
            self._config.port,
            reason,
        )


def _handle(follower: _FollowerState, message: Message) -> None:
    if message["type"] == "views":
        follower.processes = views_of(message)
    elif message["type"] == "dumps":
        follower.dumps = {str(name): str(text) for name, text in message["dumps"].items()}
    elif message["type"] == "goodbye":
        follower.received_goodbye = True


def _listen(host: str, port: int) -> socket.socket:
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address, family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)
