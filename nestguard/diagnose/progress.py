"""Compares how far ranks have progressed, and finds ranks that have skipped a collective."""

from collections.abc import Sequence

from nestguard.observe.view import Phase, ProcessState, ProcessView

_MICROBATCH_PHASES = (Phase.LOADING, Phase.FORWARD, Phase.BACKWARD)
ProgressKey = tuple[int, int, int, int]
"""Sort key: a rank with a smaller key has progressed less."""


def progress_key(view: ProcessView) -> ProgressKey:
    """Returns how far a rank has progressed: its device if that is known, which its process may be ahead of.

    The order is by step, then by phase. Loading, forward and backward repeat for each microbatch of a step, so they
    count as one phase that is ordered by microbatch first.
    """
    device = view.reading.device
    return process_progress_key(view) if device is None else _key(device.phase, device.step, device.microbatch)


def process_progress_key(view: ProcessView) -> ProgressKey:
    """Returns how far the process of a rank has progressed; see `progress_key`."""
    reading = view.reading
    if view.state is ProcessState.NOT_STARTED:
        return -2, 0, 0, 0
    return _key(reading.last_phase, reading.step, reading.microbatch)


def _key(phase: Phase, step: int | None, microbatch: int | None) -> ProgressKey:
    step = -1 if step is None else step
    if phase in _MICROBATCH_PHASES:
        return step, int(Phase.LOADING), -1 if microbatch is None else microbatch, int(phase)
    return step, int(phase), 0, 0


def skipped_collectives(views: Sequence[ProcessView]) -> dict[str, str]:
    """Finds ranks that have progressed at least as far as another rank but have entered too few collectives.

    A process counts the collectives that it launches, so processes are compared, not devices.

    Returns:
        The explanation for each such rank, by process name.
    """
    explanations = {}
    # Thousands of ranks share a few positions, so each rank is compared with one rank per position only.
    distinct = {
        (process_progress_key(view), view.reading.collectives, view.reading.first_step): view
        for view in reversed(views)
    }
    for view in views:
        for other in distinct.values():
            if process_progress_key(view) >= process_progress_key(other) and _has_skipped(view, other):
                explanations[view.name] = (
                    f"skipped a collective: it has entered {view.reading.collectives} and is at step "
                    f"{view.reading.step}, but rank {other.rank} has entered {other.reading.collectives} and is at "
                    f"step {other.reading.step}"
                )
                break
    return explanations


def _has_skipped(view: ProcessView, other: ProcessView) -> bool:
    """Compares a rank with another one that has not progressed further.

    The number of collectives expected from the steps counts only if the other rank has entered exactly one per step.
    """
    if view.reading.collectives < other.reading.collectives:
        return True
    return 0 < other.reading.collectives == _expected_collectives(other) and view.reading.collectives < (
        _expected_collectives(view)
    )


def _expected_collectives(view: ProcessView) -> int:
    """Returns the number of collectives that a rank has entered if there is one in each step."""
    reading = view.reading
    if reading.step is None or reading.first_step is None:
        return 0
    return reading.step - reading.first_step + (reading.last_phase >= Phase.COLLECTIVE)
