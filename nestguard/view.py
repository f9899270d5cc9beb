"""A process as its node sees it, and one of a node that is out of touch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from nestguard.process import ProcessState
from nestguard.record import Identity, Phase, Reading


@dataclass(frozen=True, kw_only=True)
class ProcessView:
    """A process as its node sees it."""

    reading: Reading
    state: ProcessState
    age_s: float
    """Seconds since its last sign of life."""

    ended_s: float = 0.0
    """Seconds since it was found gone, or since its node was last in touch; 0 where it never was."""

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return self.reading.name

    @property
    def rank(self) -> int:
        """Its rank, or that of the rank whose worker it is."""
        return self.reading.identity.rank

    @property
    def is_rank(self) -> bool:
        """Whether it is a rank and no loader worker."""
        return self.reading.identity.worker is None

    @property
    def is_live(self) -> bool:
        """Whether it takes part in the run, as far as is known."""
        return not self.reading.phase.is_final and not self.state.has_ended and not self.is_unseen

    @property
    def is_unseen(self) -> bool:
        """Whether its node is out of touch, so that nothing is known of it by now."""
        return self.state is ProcessState.UNSEEN

    @property
    def is_dead(self) -> bool:
        """Whether it is gone without having said how it ends."""
        return self.state.has_ended and not self.reading.phase.is_final


def never_seen(identity: Identity, state: ProcessState, age_s: float = 0.0, ended_s: float = 0.0) -> ProcessView:
    """A rank that has said nothing so far."""
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


def missing_ranks(views: Iterable[ProcessView], identity: Identity, out_of_touch_s: float) -> list[ProcessView]:
    """The ranks of a run of which no node tells anything.

    Args:
        views: What is known.
        identity: Of any rank.
        out_of_touch_s: Seconds since the nodes were last in touch; 0 where they never were.
    """
    missing = set(range(identity.world_size)) - {view.rank for view in views if view.is_rank}
    size = identity.local_world_size
    return [
        never_seen(
            replace(identity, rank=rank, local_rank=rank % size, node_rank=rank // size, host="", worker=None),
            ProcessState.UNSEEN,
            ended_s=out_of_touch_s,
        )
        for rank in sorted(missing)
    ]
