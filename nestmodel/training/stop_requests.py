"""Requests to end a run early: what this rank was asked, and what all ranks have agreed on.

A rank may be asked at any moment, by a signal or by its clock. The requests travel with the sums that all ranks add up
at every optimizer step, so that every rank decides after the same step.
"""

from dataclasses import dataclass


@dataclass
class StopRequests:
    """The flags of one rank; `agree` sets those that are equal on all ranks."""

    preempted_here: bool = False
    """This rank was asked to checkpoint and exit."""

    out_of_time_here: bool = False
    """`trainer.max_time` has passed by the clock of this rank."""

    must_exit: bool = False
    """Some rank was asked to checkpoint and exit, as of the last optimizer step."""

    must_finish: bool = False
    """`trainer.max_time` has passed on some rank, as of the last optimizer step."""

    def agree(self, num_preempted: float, num_out_of_time: float) -> None:
        """Takes over the number of ranks with each request, summed over all ranks."""
        self.must_exit, self.must_finish = num_preempted > 0, num_out_of_time > 0
