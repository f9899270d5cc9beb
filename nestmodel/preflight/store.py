"""How ranks tell each other what they found: through the store at which they met, not by collectives.

A collective hangs when one rank does not come, and cannot say which. A store can be asked who has been there.
"""

import json
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from nestmodel.errors import TrainingError

_NAME = "nestmodel preflight"
_SHORTEST_WAIT_S = 0.05
_LEAVING_S = 30.0


class StoreExchange:
    """Words of every rank for every rank; rank 0 collects them and hands them out.

    Args:
        rank: Of this process.
        world_size: Number of ranks. With one, nothing is asked of torch.distributed.
        timeout_s: How long rank 0 waits for the others once it is there.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._store = PrefixStore(_NAME, _get_default_store()) if world_size > 1 else None

    def exchange(self, topic: str, word: Any) -> list[Any]:
        """Returns what each rank said, in order, None for one that did not come in time; the same on every rank.

        Args:
            topic: A new one every time.
            word: Anything that JSON can hold, but None.

        Raises:
            TrainingError: Rank 0 did not come.
        """
        if self._store is None:
            return [word]
        self._tell(f"{topic}/{self._rank}", word)
        if self._rank == 0:
            deadline = time.monotonic() + self._timeout_s
            words = [self._wait_for(f"{topic}/{rank}", deadline) for rank in range(self._world_size)]
            self._tell(f"{topic}/all", words)
            return words
        # Rank 0 may come as late as any, and then wait for others.
        said: list[Any] | None = self._wait_for(f"{topic}/all", time.monotonic() + 2 * self._timeout_s + _LEAVING_S)
        if said is None:
            raise TrainingError(
                f"rank {self._rank}: rank 0 did not come back from {topic!r} within {2 * self._timeout_s:g} s, or has "
                "ended. Look at its output, and at its machine."
            )
        return said

    def leave(self) -> None:
        """Lets everybody go: rank 0, at which the store may be, last."""
        if self._store is None:
            return
        deadline = time.monotonic() + _LEAVING_S
        if self._rank == 0:
            self._tell("end", True)
            for rank in range(1, self._world_size):
                self._wait_for(f"left/{rank}", deadline)
        else:
            self._wait_for("end", deadline)
            self._tell(f"left/{self._rank}", True)

    def _tell(self, key: str, word: Any) -> None:
        assert self._store is not None
        with suppress(RuntimeError):  # the store is gone, which whoever waits for an answer finds out
            self._store.set(key, json.dumps(word))

    def _wait_for(self, key: str, deadline: float) -> Any:
        assert self._store is not None
        try:
            self._store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), _SHORTEST_WAIT_S)))
            return json.loads(self._store.get(key))
        except RuntimeError:  # not there in time, or the store is gone
            return None
