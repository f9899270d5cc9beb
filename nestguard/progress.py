"""How far a rank has got beside others, and whether it has skipped a collective on the way."""

from collections.abc import Sequence

from nestguard.process import ProcessState
from nestguard.record import Phase
from nestguard.view import ProcessView

_STEP_PHASES = (Phase.LOADING, Phase.FORWARD, Phase.BACKWARD)
PlaceKey = tuple[int, int, int, int]
"""Places compare as how far they are."""


def place(view: ProcessView) -> PlaceKey:
    """How far a rank has got. Loading, forward and backward take turns within a step, the other phases do not."""
    reading = view.reading
    if view.state is ProcessState.NOT_STARTED:
        return -2, 0, 0, 0
    step = -1 if reading.step is None else reading.step
    phase = reading.last_phase
    if phase in _STEP_PHASES:
        return step, int(Phase.LOADING), -1 if reading.microbatch is None else reading.microbatch, int(phase)
    return step, int(phase), 0, 0


def skipped(views: Sequence[ProcessView]) -> dict[str, str]:
    """Ranks that are no less far than another and have entered too few collectives for it."""
    found = {}
    # Of thousands of ranks in a few places, one of each tells as much as all.
    distinct = {(place(view), view.reading.collectives, view.reading.first_step): view for view in reversed(views)}
    for view in views:
        for other in distinct.values():
            if place(view) >= place(other) and _has_skipped(view, other):
                found[view.name] = (
                    f"has skipped a collective: it has entered {view.reading.collectives} and is in step "
                    f"{view.reading.step}, while rank {other.rank} has entered {other.reading.collectives} and is in "
                    f"step {other.reading.step}"
                )
                break
    return found


def _has_skipped(view: ProcessView, other: ProcessView) -> bool:
    """Compares a rank with one that is no further; by steps, too, if that one has entered one in each of them."""
    if view.reading.collectives < other.reading.collectives:
        return True
    return 0 < other.reading.collectives == _expected(other) and view.reading.collectives < _expected(view)


def _expected(view: ProcessView) -> int:
    """The collectives that a rank has entered if there is one in each step."""
    reading = view.reading
    if reading.step is None or reading.first_step is None:
        return 0
    return reading.step - reading.first_step + (reading.last_phase >= Phase.COLLECTIVE)
