"""A device that runs beside the process, as a GPU does: a stand-in made of a thread.

Kernels run in the order in which they are launched. A kernel that hangs never ends.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

HANG_S = 120.0


def hang_on_device() -> None:
    time.sleep(HANG_S)


class StandInEvent:
    """An event of the stand-in; done when the device has reached it."""

    def __init__(self, device: "StandIn") -> None:
        self._device = device
        self._reached = threading.Event()

    def record(self) -> None:
        self._reached = reached = threading.Event()
        self._device.put(reached.set)

    def is_done(self) -> bool:
        return self._reached.is_set()


class StandIn:
    """A device whose kernels are calls in a thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.num_events = 0
        threading.Thread(target=self._run, daemon=True).start()

    def new_event(self) -> StandInEvent:
        self.num_events += 1
        return StandInEvent(self)

    def put(self, kernel: Callable[[], Any]) -> None:
        self._work.put(kernel)

    def launch(self, *, hang: bool = False) -> None:
        """Launches a kernel; returns at once."""
        self.put(hang_on_device if hang else lambda: time.sleep(0.01))

    def wait(self) -> None:
        """Waits until the device has done all of its work."""
        done = threading.Event()
        self.put(done.set)
        done.wait()

    def _run(self) -> None:
        while True:
            self._work.get()()
