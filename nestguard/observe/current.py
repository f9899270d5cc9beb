"""The heartbeat of this process, to which any code can write; loader workers start their own."""

import logging
import os
import sys
from dataclasses import replace

from nestguard.observe.errors import GuardError
from nestguard.observe.heartbeat import Heartbeat, HeartbeatSlot, NoHeartbeat
from nestguard.observe.view import Phase

_log = logging.getLogger(__name__)

_current: Heartbeat = NoHeartbeat()
_parent: HeartbeatSlot | None = None
"""In a forked process, the heartbeat slot of the process that it was forked from."""

_handles_fork = False
"""Whether `_reset_after_fork` is registered; a registration cannot be removed."""


def current() -> Heartbeat:
    """Returns the heartbeat of this process; a `NoHeartbeat` while no stall guard is active."""
    return _current


def set_current(heartbeat: Heartbeat) -> None:
    """Sets the heartbeat of this process. A forked child has none until it calls `start_worker`."""
    global _current, _handles_fork
    _current = heartbeat
    if not _handles_fork and heartbeat.slot is not None:
        os.register_at_fork(after_in_child=_reset_after_fork)
        _handles_fork = True


def start_worker(worker_id: int, num_workers: int, slot: HeartbeatSlot | None = None) -> None:
    """Starts the heartbeat of a loader worker; to be called when the worker starts.

    Does nothing while no stall guard is active. If the heartbeat cannot be written, a warning is logged and the worker
    runs without one.

    Args:
        worker_id: Id of the worker, from 0.
        num_workers: Number of workers of the loader.
        slot: Heartbeat slot of the worker's rank, `current().slot`. Required if the worker is not forked from the rank.
    """
    slot = slot or _parent or _current.slot
    if slot is None:
        return
    assert 0 <= worker_id < num_workers
    try:
        heartbeat = Heartbeat(slot.directory, replace(slot.identity, worker=worker_id))
        heartbeat.arm()
    except (GuardError, OSError) as error:
        _log.warning("loader worker %d runs without a heartbeat and is not watched: %s", worker_id, error)
        return
    heartbeat.beat(Phase.LOADING)
    set_current(heartbeat)
    if "multiprocessing" in sys.modules:
        from multiprocessing.util import Finalize

        # Processes started by multiprocessing exit without running atexit handlers.
        Finalize(None, heartbeat.finish, args=(Phase.DONE,), exitpriority=0)


def _reset_after_fork() -> None:
    global _current, _parent
    _parent = _current.slot or _parent
    _current = NoHeartbeat()
