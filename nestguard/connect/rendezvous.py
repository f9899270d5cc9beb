"""Chooses the role of this node's monitor and connects it to the monitors of the other nodes."""

import logging
import time

from nestguard.connect.authentication import SharedToken
from nestguard.connect.coordinator import Coordinator
from nestguard.connect.follower import Follower
from nestguard.connect.peers import LocalOnly, PeerConfig
from nestguard.observe.record import Identity

_log = logging.getLogger(__name__)
_BIND_TIMEOUT_S = 10.0
"""How long node 0 waits for its port, which the monitor of an earlier attempt may still hold."""

_RETRY_S = 0.25


def connect_peers(
    config: PeerConfig | None, identity: Identity, connect_timeout_s: float, token: SharedToken
) -> LocalOnly:
    """Returns the role of this node's monitor.

    Args:
        config: Where the monitors connect to each other; None for a single node.
        identity: Identity of the rank that started this monitor.
        connect_timeout_s: For how long a follower tries to reach the coordinator.
        token: The token of the run; the monitors connect once it is known.

    Returns:
        `Coordinator` on node 0 and `Follower` on the others. `LocalOnly` without `config`, and, with a warning, on a
        node 0 that cannot listen on its port.
    """
    if config is None:
        return LocalOnly()
    if identity.node_rank > 0:
        return Follower(config, identity, connect_timeout_s, token)
    deadline = time.monotonic() + _BIND_TIMEOUT_S
    while True:
        try:
            return Coordinator(config, identity, token)
        except OSError as error:
            if time.monotonic() > deadline:
                _log.warning(
                    "cannot listen at %s, port %d; each node decides for itself and prints its own table: %s",
                    config.host,
                    config.port,
                    error,
                )
                return LocalOnly()
        time.sleep(_RETRY_S)
