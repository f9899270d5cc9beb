"""Chooses free TCP ports on which the processes of a test listen."""

import itertools
import os
import socket

# Below Linux's ephemeral range, so the kernel gives none of these to an outgoing connection or to port 0.
_FIRST, _NUM = 20_000, 10_000

# Parallel test processes have nearby ids; the factor makes them try different ports.
_candidates = itertools.count(os.getpid() * 101)


def free_port() -> int:
    """Returns a port that nothing listens on, a different one at every call."""
    for candidate in itertools.islice(_candidates, _NUM):
        port = _FIRST + candidate % _NUM
        with socket.socket() as server:
            try:
                server.bind(("", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no free port in {_FIRST} to {_FIRST + _NUM - 1}")
