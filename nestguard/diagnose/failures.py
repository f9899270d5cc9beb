"""Diagnoses a run in which a rank has died or failed."""

import signal
from collections.abc import Mapping, Sequence

from nestguard.diagnose.diagnosis import (
    WATCHDOG,
    Diagnoses,
    Diagnosis,
    contact_reason,
    culprit,
    end_reason,
    own_diagnosis,
    progress_text,
    waiting,
    waits_for_ranks,
)
from nestguard.diagnose.limits import StallLimits
from nestguard.diagnose.progress import progress_key, skipped_collectives
from nestguard.observe.view import Phase, ProcessView, ranks_text

DEAD_GRACE_S = 0.5
"""Delay after a death, in which other ranks can report what they know about it."""

FAILED_GRACE_S = 2.0
"""Time that a failed rank has to exit by itself."""

_DEATH_DETECTION_S = 0.2
"""Added to the age of a death: connections break before the monitor detects it, so other ranks report errors first."""

_CONTACT_LOSS_S = 10.0
"""A failure within this time after contact with a node was lost may be a consequence of that loss."""


def diagnose_failures(ranks: Sequence[ProcessView], limits: StallLimits) -> tuple[Diagnoses, bool]:
    """Diagnoses the ranks if any of them has died or failed.

    The culprit is the rank that ended first, unless a rank has skipped a collective: the others then fail in
    that collective. A death comes before the errors that were reported after the dead rank's last heartbeat, however
    late the monitor noticed it, unless a rank with such an error had ended by then: launchers end the other ranks once
    a process has ended, not before. If the first rank was aborted after it had long waited for others, the culprits are
    those with the least progress instead. Ranks whose node lost contact shortly before are culprits as well.

    Returns:
        The diagnoses, empty if no rank has died or failed, and whether the run has to be stopped now.
    """
    ended, must_stop = _ended(ranks)
    if not ended:
        return {}, False
    first = max(
        (view for view in ranks if view.name in ended), key=lambda view: (ended[view.name], view.ended_s, -view.rank)
    )
    skipped = skipped_collectives([view for view in ranks if view.is_live or view.name in ended])
    reasons = dict(skipped) or _missing_in_collective(ranks, first, limits) or {first.name: end_reason(first)}
    for view in ranks:
        if view.is_unseen and 0 < view.ended_s <= ended[first.name] + _CONTACT_LOSS_S:
            reasons[view.name] = contact_reason(view)
    diagnoses = _diagnoses(ranks, ended, skipped, reasons)
    return diagnoses, must_stop or all(view.state.has_ended for view in ranks if not view.is_unseen)


def _missing_in_collective(ranks: Sequence[ProcessView], first: ProcessView, limits: StallLimits) -> dict[str, str]:
    """Returns the ranks that held up a rank which NCCL's watchdog then aborted, with the reason for each.

    The watchdog aborts a rank in which a collective takes too long: nearly always one that waits for others. A rank
    aborted after a shorter silence has another problem.
    """
    waited_s = first.age_s - first.ended_s
    is_timeout = first.is_dead and first.exit_signal == signal.SIGABRT and waited_s > limits.step_s / 2
    if not is_timeout or not waits_for_ranks(first):
        return {}
    others = [view for view in ranks if view.is_live or view.is_dead]
    least_progress = min(progress_key(view) for view in others)
    if least_progress == progress_key(first):
        return {}
    reason = f"rank {first.rank}, which had waited {waited_s:.0f} s for this rank, was ended by SIGABRT: {WATCHDOG}"
    return {view.name: f"{progress_text(view)}; {reason}" for view in others if progress_key(view) == least_progress}


def _ended(ranks: Sequence[ProcessView]) -> tuple[dict[str, float], bool]:
    """Returns, for ranks that died or failed, the seconds since then, and whether a grace period is over."""
    ended = {}
    must_stop = False
    failed = [view for view in ranks if view.reading.phase is Phase.FAILED]
    for view in ranks:
        if view.is_dead:
            consequences = [other.age_s for other in failed if _may_follow(other, view)]
            ended[view.name] = max([view.ended_s, *consequences]) + _DEATH_DETECTION_S
            must_stop |= view.ended_s >= DEAD_GRACE_S
        elif view.reading.phase is Phase.FAILED:
            ended[view.name] = view.age_s
            must_stop |= view.age_s >= FAILED_GRACE_S or (view.state.has_ended and view.ended_s >= DEAD_GRACE_S)
    return ended, must_stop


def _may_follow(failed: ProcessView, dead: ProcessView) -> bool:
    """Returns whether a rank may have failed because another one died, which the monitor noticed after the failure.

    NCCL's watchdog aborts ranks because of another one's failure. Only the time of an abort tells whether
    it came first.
    """
    had_ended = failed.state.has_ended and failed.ended_s > dead.ended_s
    return failed.age_s <= dead.age_s and not had_ended and dead.exit_signal != signal.SIGABRT


def _diagnoses(
    ranks: Sequence[ProcessView],
    ended: Mapping[str, float],
    skipped: Mapping[str, str],
    reasons: Mapping[str, str],
) -> Diagnoses:
    """Diagnoses culprits (those with a reason), other ranks that ended, and ranks that wait."""
    culprit_ranks = ranks_text([view.rank for view in ranks if view.name in reasons])
    diagnoses: Diagnoses = {}
    for view in ranks:
        detail = view.reading.detail if view.reading.phase.is_final else ""
        if view.name in reasons:
            failure = f"; then failed: {detail}" if view.name in skipped and detail else ""
            diagnoses[view.name] = culprit(view, reasons[view.name] + failure)
        elif view.name in ended:
            reason = f"after {culprit_ranks}" + (f": {detail}" if detail else "")
            diagnoses[view.name] = Diagnosis(own_diagnosis(view).kind, reason)
        elif view.is_live and waits_for_ranks(view):
            diagnoses[view.name] = waiting(culprit_ranks)
    return diagnoses
