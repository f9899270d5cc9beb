"""How long this rank works on a step before it waits for other ranks, and which ranks take longer than the others.

All ranks do equal work in every step, so one that takes longer holds up all others: its disk, its CPU or its GPU is
slower, or shared. Every `WINDOW` steps, the ranks exchange the means of their times, behind the all-reduce of the step.
Only a mean shows what a rank costs the others: loader workers deliver batches in bursts, so that most waits are zero.
"""

import bisect
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Variable

WINDOW = 50
"""Number of steps over which the mean is taken. A rank is named if it is slow in two windows in a row."""

MIN_FACTOR = 1.1
"""A rank is slow if its mean time is more than this multiple of the median of the other ranks."""

PHASES = ("loading", "forward", "backward")


class SlowRank(NamedTuple):
    """A rank that takes longer than the others."""

    rank: int
    factor: float
    """Its mean time over the median of the other ranks."""

    phase: str
    """Where it loses most of the time."""

    def __str__(self) -> str:
        return f"takes {self.factor:.2f} times as long as the other ranks, mostly in {self.phase}"


class Pace:
    """Measures the phases of the steps of this rank: on a GPU by events in its work, without waiting for them.

    A GPU that still computes while the process waits for a batch loses no time, and the events measure no wait.

    Args:
        device: Where the rank computes; None measures nothing, for a run of one rank.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._is_on = device is not None
        is_gpu = device is not None and device.type == "cuda"
        self._mark: Callable[[], Any] = _recorded_event if is_gpu else time.perf_counter
        self._seconds: Callable[[Any, Any], float] = _seconds_between if is_gpu else lambda first, last: last - first
        self._loading_since: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._marks: list[list[Any]] = []
        self._steps: list[tuple[float, float, float]] = []

    def wait_for_batch(self) -> None:
        """Notes that the rank begins to wait for its next microbatch."""
        if self._is_on:
            self._loading_since = self._mark()

    def begin_forward(self) -> None:
        """Notes that a microbatch has arrived."""
        if not self._is_on:
            return
        mark = self._mark()
        if self._loading_since is not None:
            self._waits.append((self._loading_since, mark))
        self._marks.append([mark])

    def begin_backward(self, loss: Tensor) -> None:
        """Notes that the backward pass begins, and lets its end be noted before DDP waits for other ranks."""
        if self._is_on:
            marks = self._marks[-1]
            marks.append(self._mark())
            mark_end_of_backward(loss, lambda: marks.append(self._mark()))

    def end_step(self) -> None:
        """Adds up the step, whose work on the device must be done."""
        if self._loading_since is not None and self._marks:
            forward_s = sum(self._seconds(first, second) for first, second, _ in self._marks)
            backward_s = sum(self._seconds(second, last) for _, second, last in self._marks)
            self._steps.append((sum(self._seconds(*wait) for wait in self._waits), forward_s, backward_s))
        self.discard_step()

    def discard_step(self) -> None:
        """Drops what was measured of a step, in which something else happened."""
        self._loading_since, self._waits, self._marks = None, [], []

    def take_means(self) -> tuple[float, float, float]:
        """Returns the mean seconds of each phase in the steps since the last call; zeros without a step."""
        steps, self._steps = self._steps, []
        if not steps:
            return 0.0, 0.0, 0.0
        loading, forward, backward = map(fmean, zip(*steps, strict=True))
        return loading, forward, backward


def mark_end_of_backward(loss: Tensor, mark: Callable[[], None]) -> None:
    """Calls `mark` when the gradients of this rank are launched, before the device waits for the other ranks.

    DDP lets the device wait at the end of the backward pass, in a callback of the autograd engine. Callbacks run in
    the order in which they are queued, and this one is queued when the backward pass begins.

    Args:
        loss: The tensor on which `backward` will be called.
        mark: Called in a thread of the autograd engine, with the stream of the calling thread.
    """

    def queue(_: Tensor) -> None:
        # DDP and FSDP use this to run code at the end of a backward pass. torch has no public way.
        Variable._execution_engine.queue_callback(mark)

    if loss.requires_grad:
        loss.register_hook(queue)


def by_time(seconds: Float[Tensor, "ranks 3"]) -> list[SlowRank]:
    """Compares each rank with the others; the slowest rank comes first. Empty if a rank has measured nothing.

    Args:
        seconds: Mean time of each rank in each phase.
    """
    rows: list[list[float]] = seconds.tolist()
    if len(rows) < 2 or not all(any(row) for row in rows):
        return []
    columns = [sorted(column) for column in (*zip(*rows, strict=True), map(sum, rows))]
    found = []
    for rank, row in enumerate(rows):
        *typical, total = (_median_without(column, own) for column, own in zip(columns, (*row, sum(row)), strict=True))
        lost = [own - median for own, median in zip(row, typical, strict=True)]
        found.append(SlowRank(rank, sum(row) / total, PHASES[lost.index(max(lost))]))
    return sorted(found, key=lambda one: -one.factor)


def _median_without(values: Sequence[float], one: float) -> float:
    """Returns the median of sorted values without one of them, without a copy: there may be thousands of ranks."""
    number, at = len(values) - 1, bisect.bisect_left(values, one)
    low, high = ((number - 1) // 2, number // 2)
    return (values[low + (low >= at)] + values[high + (high >= at)]) / 2


class SlowRanks:
    """Names each rank that has taken longer than the others in two windows in a row, once."""

    def __init__(self) -> None:
        self._slow_before: set[int] = set()
        self._named: set[int] = set()

    def newly_slow(self, ranks: Sequence[SlowRank]) -> list[SlowRank]:
        """Returns the ranks that are to be named now.

        Args:
            ranks: All ranks in this window.
        """
        slow = [one for one in ranks if one.factor > MIN_FACTOR]
        named = [one for one in slow if one.rank in self._slow_before - self._named]
        self._slow_before = {one.rank for one in slow}
        self._named |= {one.rank for one in named}
        return named


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    seconds: float = first.elapsed_time(last) / 1000
    return seconds
