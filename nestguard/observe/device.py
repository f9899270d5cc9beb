"""Observes which phase the device of a process, such as a GPU, executes.

A process only launches work on a device and runs ahead of it. When work on the device hangs, the process blocks later,
in another phase. So an event is recorded on the device where each phase begins, behind all work launched before. A
thread polls the events, without waiting for any.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from nestguard.observe.directory import PARTIAL_SUFFIX, TRACE_SUFFIX, TRACES_REQUEST, create_file
from nestguard.observe.view import DevicePosition, Phase

POLL_S = 0.25
"""Interval at which the events are polled, in seconds."""

_MAX_PENDING = 1024
"""Limit for the events that are not done. Further ones are not recorded until the device has caught up."""

_JOIN_S = 1.0

TraceReader = Callable[[], str]
"""Returns the trace of torch's flight recorder as JSON; an empty text without a recorder."""


class DeviceEvent(Protocol):
    """A point in the work of a device. It is used again once it is done. Methods must not wait for the device."""

    def record(self) -> None:
        """Marks the end of all work that the calling thread has launched so far."""

    def is_done(self) -> bool:
        """Returns whether the device has finished the work before the mark. Any thread may call this."""


class _Mark(NamedTuple):
    event: DeviceEvent
    position: DevicePosition


class DeviceWatch:
    """Follows the phases of a device in a thread of its own, until `stop`.

    Args:
        new_event: Creates an event. Called for the first marks only, because events are reused.
        write: Receives the position of the device after every poll; None until the first mark is reached.
        on_poll: Called after every poll.
    """

    def __init__(
        self,
        new_event: Callable[[], DeviceEvent],
        write: Callable[[DevicePosition | None], None],
        on_poll: Callable[[], None],
    ) -> None:
        self._new_event = new_event
        self._write = write
        self._on_poll = on_poll
        self._pending: deque[_Mark] = deque()
        self._free: deque[DeviceEvent] = deque()
        self._newest: DevicePosition | None = None
        self._position: DevicePosition | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nestguard-device", daemon=True)
        self._thread.start()

    def mark(self, phase: Phase, step: int | None, microbatch: int | None) -> None:
        """Records that a phase begins behind the work launched so far. A repeated position is recorded once."""
        position = DevicePosition(phase, step, microbatch)
        if position == self._newest or len(self._pending) >= _MAX_PENDING or self._stopped.is_set():
            return
        event = self._free.popleft() if self._free else self._new_event()
        event.record()
        self._pending.append(_Mark(event, position))
        self._newest = position

    def stop(self) -> None:
        """Makes the thread end; does not wait for it."""
        self._stopped.set()

    def close(self) -> None:
        """Makes the thread end, and waits for it for at most a second."""
        self.stop()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                self._poll()
            except RuntimeError:
                return  # the device has failed, which the process itself will notice and report
            self._on_poll()

    def _poll(self) -> None:
        while self._pending and self._pending[0].event.is_done():
            mark = self._pending.popleft()
            self._position = mark.position
            self._free.append(mark.event)
        self._write(self._position)


def write_trace_if_requested(directory: Path, name: str, read: TraceReader | None) -> None:
    """Writes the trace of torch's flight recorder, which lists unfinished collectives, once the monitor requests it.

    Args:
        directory: Where the processes of this node write their heartbeats.
        name: Base name of the files of this process.
        read: Returns the trace; None without a flight recorder.
    """
    trace = directory / (name + TRACE_SUFFIX)
    if read is None or trace.exists() or not (directory / TRACES_REQUEST).exists():
        return
    partial = trace.with_name(f".{trace.name}{PARTIAL_SUFFIX}")
    with contextlib.suppress(OSError, RuntimeError), create_file(partial) as file:
        file.write(read().encode())
        partial.rename(trace)
