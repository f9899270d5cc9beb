"""Diagnoses a run in which ranks have written no heartbeat for longer than their limits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nestguard.diagnose.diagnosis import (
    Diagnoses,
    Diagnosis,
    DiagnosisKind,
    absent_ranks_suffix,
    behind_reason,
    contact_reason,
    culprit,
    same_collective_reason,
    silence_reason,
    stopped_reason,
    waiting,
    waits_for_ranks,
)
from nestguard.diagnose.limits import StallLimits, limits_beside_silence
from nestguard.diagnose.progress import ProgressKey, progress_key, skipped_collectives
from nestguard.observe.view import NodeSilence, Phase, ProcessState, ProcessView, ranks_text


def diagnose_silent_nodes(
    ranks: Sequence[ProcessView], limits: StallLimits, silences: Mapping[int, NodeSilence]
) -> Diagnoses:
    """Diagnoses the ranks if silent nodes hold up the others.

    A silent monitor does not prove that its ranks have stopped. The other ranks are held up only if one of them exceeds
    its limit, where a step may take at most `node_silence_s`.

    Returns:
        The diagnoses; empty if no node is silent or the other ranks make progress.
    """
    others = [view for view in ranks if view.is_live and view.reading.identity.node_rank not in silences]
    if not silences or not _late_ranks(others, limits_beside_silence(limits)):
        return {}
    nodes = ", ".join(f"node {node}" for node in sorted(silences))
    diagnoses: Diagnoses = {}
    for view in ranks:
        silence = silences.get(view.reading.identity.node_rank)
        if silence is not None and (view.is_live or view.is_unseen):
            reason = f"no message from the monitor of its node for {silence.seconds:.0f} s"
            diagnoses[view.name] = Diagnosis(DiagnosisKind.SILENT, reason, True)
        elif view.is_live:
            diagnoses[view.name] = waiting(nodes)
    return diagnoses


def diagnose_stall(ranks: Sequence[ProcessView], limits: StallLimits, silences: Mapping[int, NodeSilence]) -> Diagnoses:
    """Diagnoses the ranks if one of them exceeds its limit.

    The ranks of a silent node count as unseen: their last known state says nothing about what they do now.

    Returns:
        The diagnoses; empty if no rank exceeds its limit.
    """
    ranks = [_unseen_if_silent(view, silences) for view in ranks]
    live = [view for view in ranks if view.is_live]
    unseen = [view for view in ranks if view.is_unseen]
    late = _late_ranks(live, limits)
    if not late:
        return {}
    reasons = _culprits(live, late, unseen, limits)
    # Loading does not wait for other ranks, so a rank that is late in loading is itself a cause.
    for view in late:
        if view.reading.actual_phase is Phase.LOADING:
            reasons.setdefault(view.name, silence_reason(view, limits))
    absent = absent_ranks_suffix(ranks)
    culprit_ranks = ranks_text([view.rank for view in ranks if view.name in reasons])
    late_names = {view.name for view in late}
    diagnoses: Diagnoses = {}
    for view in live + unseen:
        if view.name in reasons:
            diagnoses[view.name] = culprit(view, reasons[view.name] + absent)
        elif waits_for_ranks(view) or view.name in late_names:
            diagnoses[view.name] = waiting(culprit_ranks)
    return diagnoses


def _unseen_if_silent(view: ProcessView, silences: Mapping[int, NodeSilence]) -> ProcessView:
    silence = silences.get(view.reading.identity.node_rank)
    if silence is None or not view.is_live:
        return view
    return replace(view, state=ProcessState.UNSEEN, ended_s=silence.seconds)


def _late_ranks(live: Sequence[ProcessView], limits: StallLimits) -> list[ProcessView]:
    """Returns the ranks that exceed their limit.

    A rank may be waiting for ranks that have progressed less, so it also has to exceed the largest limit of those. A
    rank that is within its own limit may just have finished a validation or a checkpoint while others waited for it;
    that time is added to its limit. Loading waits for no other rank, so only a rank's own limit counts there.
    """
    limit_at: dict[ProgressKey, float] = {}
    for view in live:
        limit = limits.limit_of(view.reading)
        allowed_s = limit if view.age_s > limit else limit + limits.exempt_s
        key = progress_key(view)
        limit_at[key] = max(limit_at.get(key, 0.0), allowed_s)
    limit_behind = {}
    largest = 0.0
    for key in sorted(limit_at):
        limit_behind[key] = largest
        largest = max(largest, limit_at[key])
    return [
        view
        for view in live
        if view.age_s > limits.limit_of(view.reading)
        and (view.reading.actual_phase is Phase.LOADING or view.age_s > limit_behind[progress_key(view)])
    ]


def _culprits(
    live: Sequence[ProcessView], late: Sequence[ProcessView], unseen: Sequence[ProcessView], limits: StallLimits
) -> dict[str, str]:
    """Returns, by process name, the reason for each rank that holds up the others. The first rule that matches counts.

    1. Ranks that are stopped.
    2. Ranks that have skipped a collective.
    3. Unseen ranks, if the ranks with the least progress wait for other ranks.
    4. All ranks, if all wait in the same collective or backward pass.
    5. Ranks with the least progress that have used more than half of their limit.
    6. Ranks with the least progress, although they send heartbeats, unless a rank is late in loading.
    """
    if stopped := [view for view in live if view.state is ProcessState.STOPPED]:
        return {view.name: stopped_reason(view) for view in stopped}
    if skipped := skipped_collectives(live):
        return skipped
    least_progress = min(progress_key(view) for view in live)
    last = [view for view in live if progress_key(view) == least_progress]
    is_waiting = all(waits_for_ranks(view) for view in last)
    if unseen and is_waiting:
        return {view.name: contact_reason(view) for view in unseen}
    if len(last) == len(live) > 1 and is_waiting:
        return {view.name: same_collective_reason(view, len(live)) for view in last}
    if slow := [view for view in last if view.age_s > limits.limit_of(view.reading) / 2]:
        return {view.name: silence_reason(view, limits) for view in slow}
    if any(view.reading.actual_phase is Phase.LOADING for view in late):
        return {}
    waited_s = max(view.age_s for view in late)
    return {view.name: behind_reason(view, waited_s) for view in last}
