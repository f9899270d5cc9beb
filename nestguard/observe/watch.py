"""Observes the processes of one node through their heartbeat files and /proc, without affecting them."""

import contextlib
import os
import select
import signal
import time
from dataclasses import replace
from pathlib import Path

from nestguard.observe.directory import CRASH_SUFFIX, open_file
from nestguard.observe.heartbeat_file import read_heartbeat
from nestguard.observe.process import exit_signal, process_state, started_ns
from nestguard.observe.view import Identity, ProcessState, ProcessView, Reading, never_seen

_SECOND_NS = 1_000_000_000
_SUSPENDED_NS = 5 * _SECOND_NS
_UNOBSERVED_NS = 10 * _SECOND_NS
"""If a device was not observed for longer than this, its position is unknown: its process may have continued since.

This happens if a call holds the GIL, or if the driver blocks the thread that observes the device.
"""

_ABORTED = b"Fatal Python error: Aborted"
"""First line of the crash dump of faulthandler after SIGABRT."""

_Process = tuple[int, int]


class NodeWatch:
    """Observes the processes that write heartbeats to one directory.

    Args:
        directory: Where the processes write their heartbeats.
        identity: Identity of the rank that started this monitor. It determines which ranks are expected.
    """

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._directory = directory
        self._identity = identity
        now = time.monotonic_ns()
        self._started_ns = self._not_before_ns = self._scanned_ns = now
        # Files of processes that ended before this run began are left over from another run.
        self._run_began_ns = started_ns(os.getppid()) or now
        self._processes: set[_Process] = set()
        self._stale: set[_Process] = set()
        self._ended_ns: dict[_Process, int] = {}
        self._exit_signals: dict[_Process, int] = {}
        self._exits: dict[int, _Process] = {}
        self._poll = select.poll()
        self.is_suspended = False
        """Whether all ranks of the node are stopped, as by Ctrl-Z: such time does not count."""

    @property
    def age_s(self) -> float:
        """Seconds since the watch was started."""
        return (time.monotonic_ns() - self._started_ns) / _SECOND_NS

    def scan(self) -> list[ProcessView]:
        """Returns the ranks of the node, including expected ranks that have not started, and their loader workers."""
        now = time.monotonic_ns()
        if now - self._scanned_ns > _SUSPENDED_NS:
            # The monitor itself was suspended. The ranks probably were as well, so their silence counts from now on.
            self._not_before_ns = now
        self._scanned_ns = now
        readings = [read_heartbeat(path) for path in sorted(self._directory.glob("rank-*.beat"))]
        views = [view for reading in readings if reading is not None and (view := self._view(reading, now))]
        live = [view for view in views if view.is_rank and view.is_live]
        self.is_suspended = bool(live) and all(view.state is ProcessState.STOPPED for view in live)
        if self.is_suspended:
            self._not_before_ns = now
            views = [replace(view, age_s=0.0) if view.is_live else view for view in views]
        seen = {view.reading.identity.local_rank for view in views if view.is_rank}
        missing = set(range(self._identity.local_world_size)) - seen
        return views + [self._missing(local_rank, now) for local_rank in sorted(missing)]

    def wait(self, seconds: float) -> None:
        """Waits for the given time, or until a process ends."""
        if not self._exits:
            time.sleep(seconds)
            return
        ready = self._poll.poll(1000 * seconds)
        now = time.monotonic_ns()
        for descriptor, _ in ready:
            self._ended_ns.setdefault(self._exits.pop(descriptor), now)
            self._poll.unregister(descriptor)
            os.close(descriptor)

    def _view(self, reading: Reading, now: int) -> ProcessView | None:
        process = (reading.pid, reading.start_ticks)
        state = process_state(*process)
        if process not in self._processes and process not in self._stale:
            is_stale = state.has_ended and not self._run_began_ns <= reading.beat_ns <= now
            if is_stale:
                self._stale.add(process)
            else:
                self._processes.add(process)
                self._watch_exit(process)
        if process in self._stale:
            return None
        if state.has_ended:
            self._ended_ns.setdefault(process, now)
            if process not in self._exit_signals and (number := self._exit_signal(reading)):
                self._exit_signals[process] = number
        elif reading.device is not None and now - reading.device_ns > _UNOBSERVED_NS:
            reading = replace(reading, device=None)
        age_ns = max(0, now - max(reading.beat_ns, self._not_before_ns))
        ended_ns = now - self._ended_ns[process] if state.has_ended else 0
        return ProcessView(
            reading=reading,
            state=state,
            age_s=age_ns / _SECOND_NS,
            ended_s=ended_ns / _SECOND_NS,
            exit_signal=self._exit_signals.get(process),
        )

    def _exit_signal(self, reading: Reading) -> int | None:
        """Returns the signal that ended a process, from /proc while it is a zombie; SIGABRT also from a crash dump."""
        number = exit_signal(reading.pid, reading.start_ticks)
        if number is None:
            with contextlib.suppress(OSError), open_file(self._directory / f"{reading.name}{CRASH_SUFFIX}") as file:
                number = int(signal.SIGABRT) if file.read(len(_ABORTED)) == _ABORTED else None
        return number

    def _watch_exit(self, process: _Process) -> None:
        """Lets `wait` return as soon as a process ends. If that is not permitted, the next `scan` detects it."""
        try:
            descriptor = os.pidfd_open(process[0])
        except OSError:
            return
        if process_state(*process).has_ended:
            os.close(descriptor)
            return
        self._exits[descriptor] = process
        self._poll.register(descriptor, select.POLLIN)

    def _missing(self, local_rank: int, now: int) -> ProcessView:
        own = self._identity
        identity = replace(own, rank=own.rank - own.local_rank + local_rank, local_rank=local_rank, worker=None)
        age_ns = now - max(self._started_ns, self._not_before_ns)
        return never_seen(identity, ProcessState.NOT_STARTED, age_s=age_ns / _SECOND_NS)
