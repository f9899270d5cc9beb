"""How long this rank works on a step before it waits for other ranks, and which ranks take longer than the others.

All ranks do equal work in every step, so one that takes longer holds up all others: its disk, its CPU or its GPU is
slower, or shared. Every `WINDOW` steps, the ranks exchange the medians of their times in the all-reduce of the step.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Variable

WINDOW = 50
"""Steps of which the median is taken. A rank is named after two windows in a row."""

MIN_FACTOR = 1.1
"""Time of a rank over the median of the others from which on it is slow."""

PHASES = ("loading", "forward", "backward")


class SlowRank(NamedTuple):
    """A rank that takes longer than the others."""

    rank: int
    factor: float
    """Its median time over the median of the other ranks."""

    phase: str
    """Where it loses most of the time."""

    def __str__(self) -> str:
        return f"takes {self.factor:.2f} times as long as the other ranks, mostly in {self.phase}"


class Pace:
    """Measures the phases of the steps of this rank: on a GPU by events in its work, which nobody waits for.

    Args:
        device: Where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._mark: Callable[[], Any] = _recorded_event if is_gpu else time.perf_counter
        self._seconds: Callable[[Any, Any], float] = _seconds_between if is_gpu else lambda first, last: last - first
        self._loading_since: float | None = None
        self._loading_s = 0.0
        self._marks: list[list[Any]] = []
        self._steps: list[tuple[float, float, float]] = []

    def wait_for_batch(self) -> None:
        """Notes that the rank begins to wait for its next microbatch."""
        self._loading_since = time.perf_counter()

    def begin_forward(self) -> None:
        """Notes that a microbatch has arrived."""
        if self._loading_since is not None:
            self._loading_s += time.perf_counter() - self._loading_since
        self._marks.append([self._mark()])

    def begin_backward(self, loss: Tensor) -> None:
        """Notes that the backward pass begins, and lets its end be noted before DDP waits for other ranks.

        DDP waits in a callback of the autograd engine. Callbacks run in the order in which they are queued, and this
        one is queued when the backward pass begins.
        """
        marks = self._marks[-1]
        marks.append(self._mark())

        def queue(_: Tensor) -> None:
            # DDP and FSDP use this to run code at the end of a backward pass. torch has no public way.
            Variable._execution_engine.queue_callback(lambda: marks.append(self._mark()))

        if loss.requires_grad:
            loss.register_hook(queue)

    def end_step(self) -> None:
        """Adds up the step, whose work on the device must be done."""
        spans = [
            (self._seconds(marks[0], marks[1]), self._seconds(marks[1], marks[2]))
            for marks in self._marks
            if len(marks) == 3
        ]
        if self._loading_since is not None and spans:
            self._steps.append((self._loading_s, sum(one for one, _ in spans), sum(one for _, one in spans)))
        self.discard_step()

    def discard_step(self) -> None:
        """Drops what was measured of a step, in which something else happened."""
        self._loading_since, self._loading_s, self._marks = None, 0.0, []

    def take_medians(self) -> tuple[float, float, float]:
        """Returns the median seconds of each phase since the last call; zeros without a step."""
        steps, self._steps = self._steps, []
        if not steps:
            return 0.0, 0.0, 0.0
        loading, forward, backward = (statistics.median(phase) for phase in zip(*steps, strict=True))
        return loading, forward, backward


class SlowRanks:
    """Finds the ranks that take longer than the others in two windows in a row."""

    def __init__(self) -> None:
        self._before: set[int] = set()

    def find(self, seconds: Float[Tensor, "ranks 3"]) -> list[SlowRank]:
        """Returns the slow ranks.

        Args:
            seconds: Median time of each rank in each phase of this window.
        """
        rows = seconds.tolist()
        found = [] if len(rows) < 2 or not all(any(row) for row in rows) else _slower(rows)
        confirmed = [slow for slow in found if slow.rank in self._before]
        self._before = {slow.rank for slow in found}
        return confirmed


def _slower(rows: Sequence[Sequence[float]]) -> list[SlowRank]:
    found = []
    for rank, row in enumerate(rows):
        others = [other for number, other in enumerate(rows) if number != rank]
        factor = sum(row) / statistics.median(map(sum, others))
        if factor > MIN_FACTOR:
            lost = [own - statistics.median(other[phase] for other in others) for phase, own in enumerate(row)]
            found.append(SlowRank(rank, factor, PHASES[lost.index(max(lost))]))
    return found


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    return first.elapsed_time(last) / 1000
