"""Requests to end a run early: those that this rank received, and the decision that all ranks share.

A request may arrive on any rank at any moment, by a signal or by the rank's clock. The requests are part of the vector
that all ranks all-reduce at every optimizer step, so that all ranks make the same decision after the same step.
"""

import time
from dataclasses import dataclass


@dataclass
class StopRequests:
    """The flags of one rank. `agree` sets `must_exit` and `must_finish`, which are equal on all ranks."""

    preempted_here: bool = False
    """This rank received a signal to write a checkpoint and exit, or Ctrl-C."""

    interrupted_here: bool = False
    """This rank received Ctrl-C, which decides the exit code of all ranks."""

    deadline_s: float | None = None
    """When `trainer.max_time` has passed, by this rank's monotonic clock; None without a limit."""

    must_exit: bool = False
    """At the last optimizer step, some rank had received a signal to write a checkpoint and exit."""

    must_finish: bool = False
    """At the last optimizer step, `trainer.max_time` had passed by the clock of some rank."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, not below 0; None without one."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())

    @property
    def out_of_time_here(self) -> bool:
        """Whether `trainer.max_time` has passed by the clock of this rank."""
        return self.seconds_left == 0.0

    def agree(self, num_preempted: float, num_out_of_time: float) -> None:
        """Sets the shared flags from the number of ranks with each request. Call it with equal values on all ranks."""
        self.must_exit, self.must_finish = num_preempted > 0, num_out_of_time > 0
