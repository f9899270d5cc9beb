"""What is known about the processes of a run, and about nodes that have stopped sending messages."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from nestguard.observe.process import ProcessState
from nestguard.observe.record import Identity, Phase, Reading


@dataclass(frozen=True, kw_only=True)
class ProcessView:
    """A process as the monitor of its node sees it: its last heartbeat and its state in the operating system."""

    reading: Reading
    state: ProcessState
    age_s: float
    """Seconds since its last heartbeat."""

    ended_s: float = 0.0
    """Seconds since the process ended or, if it is unseen, since contact with its node was lost.

    0 while the process runs, and if there was never any contact with its node.
    """

    exit_signal: int | None = None
    """Signal that ended the process; None if it is not known, or if there was none."""

    @property
    def name(self) -> str:
        """Unique name of the process, for example `rank-3.worker-0`."""
        return self.reading.name

    @property
    def rank(self) -> int:
        """Rank of the process; for a loader worker, the rank that it loads for."""
        return self.reading.identity.rank

    @property
    def is_rank(self) -> bool:
        """Whether the process is a rank, not a loader worker."""
        return self.reading.identity.worker is None

    @property
    def is_live(self) -> bool:
        """Whether the process is known to take part in the run: it has not ended and its node is in contact."""
        return not self.reading.phase.is_final and not self.state.has_ended and not self.is_unseen

    @property
    def is_unseen(self) -> bool:
        """Whether there is no contact with the node of the process, so that its present state is unknown."""
        return self.state is ProcessState.UNSEEN

    @property
    def is_dead(self) -> bool:
        """Whether the process ended without recording how."""
        return self.state.has_ended and not self.reading.phase.is_final


class NodeSilence(NamedTuple):
    """A connected node whose monitor sends no messages."""

    host: str
    seconds: float
    """Time since the last message."""


def never_seen(identity: Identity, state: ProcessState, age_s: float = 0.0, ended_s: float = 0.0) -> ProcessView:
    """Returns the view of a rank that has not written a heartbeat."""
    reading = Reading(
        identity=identity,
        name=identity.name,
        pid=0,
        start_ticks=0,
        is_armed=False,
        error_file=None,
        beat_ns=0,
        phase=Phase.STARTING,
        last_phase=Phase.STARTING,
        step=None,
        microbatch=None,
        collectives=0,
        first_step=None,
        cuts=(),
        detail="",
    )
    return ProcessView(reading=reading, state=state, age_s=age_s, ended_s=ended_s)


def missing_ranks(views: Iterable[ProcessView], identity: Identity, disconnected_s: float) -> list[ProcessView]:
    """Returns unseen views for the ranks of the run that are not in `views`.

    Args:
        views: The processes that are known.
        identity: Identity of any rank of the run.
        disconnected_s: Seconds since the monitors lost their connection; 0 if they were never connected.
    """
    missing = set(range(identity.world_size)) - {view.rank for view in views if view.is_rank}
    size = identity.local_world_size
    return [
        never_seen(
            replace(identity, rank=rank, local_rank=rank % size, node_rank=rank // size, host="", worker=None),
            ProcessState.UNSEEN,
            ended_s=disconnected_s,
        )
        for rank in sorted(missing)
    ]
