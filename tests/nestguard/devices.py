"""Devices that run beside the process, as a GPU does: a stand-in made of a thread, and the GPU itself.

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

    def launch_collective(self, kernel: Callable[[], None]) -> None:
        """Launches a kernel that waits for other ranks."""
        self.put(kernel)

    def wait(self) -> None:
        """Waits until the device has done all of its work."""
        done = threading.Event()
        self.put(done.set)
        done.wait()

    def _run(self) -> None:
        while True:
            self._work.get()()


class CudaDevice:
    """The first GPU. Ranks that share it cannot use NCCL, so a collective waits on the CPU."""

    def __init__(self) -> None:
        import torch

        from nestmodel.training.callbacks.stall_guard import CudaEvent

        self._torch = torch
        self.new_event = CudaEvent
        self._collectives: list[Callable[[], None]] = []
        torch.cuda.init()

    def launch(self, *, hang: bool = False) -> None:
        """Launches a kernel, which runs for about a millisecond or, if it hangs, for minutes."""
        # The argument is an int32 number of cycles in some versions, so that a long wait needs several kernels.
        for _ in range(200 if hang else 1):
            self._torch.cuda._sleep(2_000_000_000 if hang else 1_000_000)

    def launch_collective(self, kernel: Callable[[], None]) -> None:
        """Notes a collective, which takes place in `wait`, once the device has done what was launched before."""
        self._collectives.append(kernel)

    def wait(self) -> None:
        """Waits until the device has done all of its work, and then for the other ranks."""
        self._torch.cuda.current_stream().synchronize()
        for kernel in self._collectives:
            kernel()
        self._collectives.clear()
