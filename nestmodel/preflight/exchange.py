"""Exchange of values between ranks through the key-value store of the process group, not through collectives.

A collective blocks if one rank is missing, and cannot tell which one. The store shows which ranks have answered.
"""

import json
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from nestmodel.errors import TrainingError

_PREFIX = "nestmodel preflight"
_MIN_WAIT_S = 0.05
_FINISH_TIMEOUT_S = 30.0


class StoreExchange:
    """Gathers one value per rank. Rank 0 collects the values of all ranks and publishes the list.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks. With one rank, torch.distributed is not used.
        timeout_s: How long rank 0 waits for the other ranks after its own value is ready, in seconds.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._store = PrefixStore(_PREFIX, _get_default_store()) if world_size > 1 else None

    def all_gather(self, topic: str, value: Any) -> list[Any]:
        """Returns the values of all ranks, in order; None for a rank that is late. The list is equal on all ranks.

        Args:
            topic: A name that was not used before.
            value: Any value that JSON can represent, except None.

        Raises:
            TrainingError: Rank 0 did not publish the list in time.
        """
        if self._store is None:
            return [value]
        self._set(f"{topic}/{self._rank}", value)
        if self._rank == 0:
            deadline = time.monotonic() + self._timeout_s
            values = [self._wait_for(f"{topic}/{rank}", deadline) for rank in range(self._world_size)]
            self._set(f"{topic}/all", values)
            return values
        # Rank 0 may be as late as any other rank, and waits for the others after that.
        deadline = time.monotonic() + 2 * self._timeout_s + _FINISH_TIMEOUT_S
        gathered: list[Any] | None = self._wait_for(f"{topic}/all", deadline)
        if gathered is None:
            raise TrainingError(
                f"rank {self._rank}: rank 0 did not answer for {topic!r} within {2 * self._timeout_s:g} s, or has "
                "ended. Look at its output, and at its machine."
            )
        return gathered

    def finish(self) -> None:
        """Waits until all ranks have finished. Rank 0, whose process may host the store, returns last."""
        if self._store is None:
            return
        deadline = time.monotonic() + _FINISH_TIMEOUT_S
        if self._rank == 0:
            self._set("end", True)
            for rank in range(1, self._world_size):
                self._wait_for(f"left/{rank}", deadline)
        else:
            self._wait_for("end", deadline)
            self._set(f"left/{self._rank}", True)

    def _set(self, key: str, value: Any) -> None:
        assert self._store is not None
        with suppress(RuntimeError):  # the store is gone; the next wait for an answer reports that
            self._store.set(key, json.dumps(value))

    def _wait_for(self, key: str, deadline: float) -> Any:
        """Returns the value of a key; None if it is not set before the deadline or the store is gone."""
        assert self._store is not None
        try:
            self._store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), _MIN_WAIT_S)))
            return json.loads(self._store.get(key))
        except RuntimeError:
            return None
