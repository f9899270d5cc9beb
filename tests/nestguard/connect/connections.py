"""Monitors of two nodes on this machine, for tests."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from nestguard import PeerConfig, StallLimits
from nestguard.connect.coordinator import Coordinator
from nestguard.connect.follower import Follower
from nestguard.connect.peers import SharedToken
from tests.nestguard.runs import PATIENCE_S, TOKEN
from tests.nestguard.views import view
from tests.ports import free_port

LIMITS = StallLimits(step_s=30, first_step_s=90, validation_s=60, checkpoint_s=60, finishing_s=30, node_silence_s=10)


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


@contextlib.contextmanager
def closing(peers: T) -> Iterator[T]:
    try:
        yield peers
    finally:
        peers.close()


def soon(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def new_config() -> PeerConfig:
    return PeerConfig(host="127.0.0.1", port=free_port(), run_id="this run")


def coordinator_of(config: PeerConfig, token: SharedToken | None = None) -> Coordinator:
    return Coordinator(config, view(0, world_size=4).reading.identity, token or SharedToken(TOKEN))


def follower_of(
    config: PeerConfig, token: SharedToken | None = None, node_rank: int = 1, limits: StallLimits = LIMITS
) -> Follower:
    identity = view(1 + node_rank, node_rank=node_rank).reading.identity
    return Follower(config, identity, limits, token or SharedToken(TOKEN))
