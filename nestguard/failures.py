"""Diagnoses a run in which a rank has died or failed."""

from collections.abc import Mapping, Sequence

from nestguard.diagnosis import (
    WAITING_PHASES,
    Diagnoses,
    Diagnosis,
    culprit,
    own_diagnosis,
    waiting,
)
from nestguard.progress import skipped_collectives
from nestguard.reasons import contact_reason, end_reason, ranks_text
from nestguard.record import Phase
from nestguard.view import ProcessView

DEAD_GRACE_S = 0.5
"""Delay after a death, in which other ranks can report what they know about it."""

FAILED_GRACE_S = 2.0
"""Time that a failed rank has to exit by itself."""

_DEATH_DETECTION_S = 0.2
"""Added to the age of a death.

Connections break before the monitor detects a death, so other ranks may report their errors first.
"""

_CONTACT_LOSS_S = 10.0
"""A failure within this time after contact with a node was lost may be a consequence of that loss."""


def diagnose_failures(ranks: Sequence[ProcessView]) -> tuple[Diagnoses, bool]:
    """Diagnoses the ranks if any of them has died or failed.

    The culprit is the rank that ended first, unless a rank has skipped a collective: the others then fail in
    that collective. Ranks whose node lost contact shortly before are culprits as well.

    Returns:
        The diagnoses, empty if no rank has died or failed, and whether the run has to be stopped now.
    """
    ended, must_stop = _ended(ranks)
    if not ended:
        return {}, False
    first = max((view for view in ranks if view.name in ended), key=lambda view: (ended[view.name], -view.rank))
    skipped = skipped_collectives([view for view in ranks if view.is_live or view.name in ended])
    reasons = dict(skipped) or {first.name: end_reason(first)}
    for view in ranks:
        if view.is_unseen and 0 < view.ended_s <= ended[first.name] + _CONTACT_LOSS_S:
            reasons[view.name] = contact_reason(view)
    diagnoses = _diagnoses(ranks, ended, skipped, reasons)
    return diagnoses, must_stop or all(view.state.has_ended for view in ranks if not view.is_unseen)


def _ended(ranks: Sequence[ProcessView]) -> tuple[dict[str, float], bool]:
    """Returns, for ranks that died or failed, the seconds since then, and whether a grace period is over."""
    ended = {}
    must_stop = False
    for view in ranks:
        if view.is_dead:
            ended[view.name] = view.ended_s + _DEATH_DETECTION_S
            must_stop |= view.ended_s >= DEAD_GRACE_S
        elif view.reading.phase is Phase.FAILED:
            ended[view.name] = view.age_s
            must_stop |= view.age_s >= FAILED_GRACE_S or (view.state.has_ended and view.ended_s >= DEAD_GRACE_S)
    return ended, must_stop


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
        detail = view.reading.detail
        if view.name in reasons:
            failure = f"; then failed: {detail}" if view.name in skipped and detail else ""
            diagnoses[view.name] = culprit(view, reasons[view.name] + failure)
        elif view.name in ended:
            reason = f"after {culprit_ranks}" + (f": {detail}" if detail else "")
            diagnoses[view.name] = Diagnosis(own_diagnosis(view).kind, reason)
        elif view.is_live and view.reading.phase in WAITING_PHASES:
            diagnoses[view.name] = waiting(culprit_ranks)
    return diagnoses
