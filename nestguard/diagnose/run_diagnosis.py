"""Diagnoses a whole run: whether it has to be stopped, why, and which processes are the culprits.

Two conditions stop a run: a rank that has died or failed, and a rank that has written no heartbeat for longer than its
limit. Of several such ranks, the one with the least progress holds up the others, unless a rank is stopped or has
skipped a collective. A rank without contact never stops a run by itself; it is a culprit if all others wait. All
functions are pure: they depend on the given views only.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from nestguard.diagnose.diagnosis import (
    WATCHDOG,
    Diagnoses,
    Diagnosis,
    DiagnosisKind,
    absent_ranks_suffix,
    contact_reason,
    culprit,
    cuts_suffix,
    end_reason,
    own_diagnosis,
    progress_text,
    silence_reason,
    waiting,
    waits_for_ranks,
)
from nestguard.diagnose.progress import ProgressKey, progress_key, skipped_collectives
from nestguard.diagnose.stall_limits import StallLimits, too_long
from nestguard.observe.view import NodeSilence, Phase, ProcessState, ProcessView, ranks_text

_DEAD_GRACE_S = 0.5
"""Delay after a death, in which other ranks can report what they know about it."""

_FAILED_GRACE_S = 2.0
"""Time that a failed rank has to exit by itself."""

_DEATH_DETECTION_S = 0.2
"""Added to the age of a death: connections break before the monitor detects it, so other ranks report errors first."""

_CONTACT_LOSS_S = 10.0
"""A failure within this time after contact with a node was lost may be a consequence of that loss."""


class RunDiagnosis(NamedTuple):
    """Diagnosis of a whole run."""

    must_stop: bool
    """Whether the run has to be stopped."""

    cause: str
    """The cause in one line; empty if the run continues."""

    diagnoses: tuple[Diagnosis, ...]
    """One diagnosis for each view, in the order of the views."""


def diagnose(
    views: Sequence[ProcessView], limits: StallLimits, silences: Mapping[int, NodeSilence] | None = None
) -> RunDiagnosis:
    """Diagnoses a run.

    Args:
        views: Ranks and loader workers, of one node or of all nodes.
        limits: How long a process may go without a heartbeat.
        silences: By node rank, how long each connected node has sent nothing.
    """
    silences = too_long(silences or {}, limits)
    views = _unseen_after_first_step(views)
    ranks = [view for view in views if view.is_rank]
    found, must_stop = _diagnose_failures(ranks, limits)
    causal_silences: Mapping[int, NodeSilence] = {}
    if not found:
        found = _diagnose_silent_nodes(ranks, limits, silences)
        causal_silences = silences if found else {}
        found = found or _diagnose_stall(ranks, limits, silences)
        must_stop = bool(found)
    _add_worker_culprits(found, views, limits)
    diagnoses = tuple(_with_own_detail(view, found.get(view.name, own_diagnosis(view))) for view in views)
    return RunDiagnosis(must_stop, _cause(views, diagnoses, causal_silences) if must_stop else "", diagnoses)


def _with_own_detail(view: ProcessView, diagnosis: Diagnosis) -> Diagnosis:
    """Adds the description that a running rank has written of itself."""
    if view.reading.phase.is_final or not view.reading.detail:
        return diagnosis
    return diagnosis._replace(reason="; ".join(filter(None, (diagnosis.reason, view.reading.detail))))


def _unseen_after_first_step(views: Sequence[ProcessView]) -> list[ProcessView]:
    """Replaces the state "not started" by "unseen" once a rank has finished a step.

    No step finishes without all ranks, so a rank without a heartbeat must be running unobserved by then.
    """
    if not any(view.is_rank and view.reading.has_stepped for view in views):
        return list(views)
    return [
        replace(view, state=ProcessState.UNSEEN) if view.state is ProcessState.NOT_STARTED else view for view in views
    ]


# Ranks that have died or failed


def _diagnose_failures(ranks: Sequence[ProcessView], limits: StallLimits) -> tuple[Diagnoses, bool]:
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
            must_stop |= view.ended_s >= _DEAD_GRACE_S
        elif view.reading.phase is Phase.FAILED:
            ended[view.name] = view.age_s
            must_stop |= view.age_s >= _FAILED_GRACE_S or (view.state.has_ended and view.ended_s >= _DEAD_GRACE_S)
    return ended, must_stop


def _may_follow(failed: ProcessView, dead: ProcessView) -> bool:
    """Returns whether a rank may have failed because another one died, which the monitor noticed after the failure.

    NCCL's watchdog aborts ranks because another one has failed, so only the time of an abort shows whether it came
    first.
    """
    had_ended = failed.state.has_ended and failed.ended_s > dead.ended_s
    return failed.age_s <= dead.age_s and not had_ended and dead.exit_signal != signal.SIGABRT


# Ranks and nodes without heartbeats


def _diagnose_silent_nodes(
    ranks: Sequence[ProcessView], limits: StallLimits, silences: Mapping[int, NodeSilence]
) -> Diagnoses:
    """Diagnoses the ranks if silent nodes hold up the others.

    A silent monitor does not prove that its ranks have stopped. The other ranks are held up only if one of them exceeds
    its limit, where a step may take at most `node_silence_s`.

    Returns:
        The diagnoses; empty if no node is silent or the other ranks make progress.
    """
    others = [view for view in ranks if view.is_live and view.reading.identity.node_rank not in silences]
    step_limits = replace(limits, step_s=min(limits.step_s, limits.node_silence_s))
    if not silences or not _late_ranks(others, step_limits):
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


def _diagnose_stall(
    ranks: Sequence[ProcessView], limits: StallLimits, silences: Mapping[int, NodeSilence]
) -> Diagnoses:
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
    reasons = _stall_reasons(live, late, unseen, limits)
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

    A rank may be waiting for ranks that have progressed less, so it also has to exceed the largest of their limits.
    A rank that is within its own limit may just have finished a validation or a checkpoint while others waited for it;
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


def _stall_reasons(
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
        return {view.name: f"by SIGSTOP, a terminal or a debugger, {progress_text(view)}" for view in stopped}
    if skipped := skipped_collectives(live):
        return skipped
    least_progress = min(progress_key(view) for view in live)
    last = [view for view in live if progress_key(view) == least_progress]
    is_waiting = all(waits_for_ranks(view) for view in last)
    if unseen and is_waiting:
        return {view.name: contact_reason(view) for view in unseen}
    if len(last) == len(live) > 1 and is_waiting:
        causes = "the network, or a rank that called a collective with another operation or shape"
        return {view.name: f"{progress_text(view)} like all known ranks; possible causes: {causes}" for view in last}
    if slow := [view for view in last if view.age_s > limits.limit_of(view.reading) / 2]:
        return {view.name: silence_reason(view, limits) for view in slow}
    if any(view.reading.actual_phase is Phase.LOADING for view in late):
        return {}
    others = f"other ranks have waited {max(view.age_s for view in late):.0f} s"
    return {view.name: f"{progress_text(view)} with heartbeats, but {others}" for view in last}


# Loader workers


def _add_worker_culprits(diagnoses: Diagnoses, views: Sequence[ProcessView], limits: StallLimits) -> None:
    """Adds loader workers that are culprits to `diagnoses`, in place, and names them in the reason of their rank."""
    stuck_ranks = {
        view.rank: view
        for view in views
        if view.is_rank
        and view.reading.actual_phase is Phase.LOADING
        and view.name in diagnoses
        and diagnoses[view.name].kind is DiagnosisKind.STUCK
    }
    for view in views:
        if view.is_rank or view.rank not in stuck_ranks:
            continue
        rank = stuck_ranks[view.rank]
        diagnosis = _diagnose_worker(view, rank, limits)
        if diagnosis is not None:
            diagnoses[view.name] = diagnosis
            suffix = f"; worker {view.reading.identity.worker} is {diagnosis.kind}{cuts_suffix(view)}"
            diagnoses[rank.name] = diagnoses[rank.name]._replace(reason=diagnoses[rank.name].reason + suffix)


def _diagnose_worker(view: ProcessView, rank: ProcessView, limits: StallLimits) -> Diagnosis | None:
    """Returns the diagnosis of a worker that is a culprit; None for any other worker."""
    silence = f"silent for {view.age_s:.0f} s{cuts_suffix(view)}"
    if view.is_dead:
        # A worker that died long before the rank got stuck belonged to an earlier epoch.
        return culprit(view, end_reason(view)) if view.ended_s < rank.age_s + limits.step_s else None
    # A worker without cuts is idle: it waits for its rank to request a batch.
    is_late = view.age_s > limits.limit_of(rank.reading) / 2 and view.reading.cuts
    is_culprit = view.is_live and (view.state is ProcessState.STOPPED or is_late)
    return culprit(view, silence) if is_culprit else None


# The cause in one line


def _cause(views: Sequence[ProcessView], diagnoses: Sequence[Diagnosis], silences: Mapping[int, NodeSilence]) -> str:
    """Returns the cause: the silent nodes, or the ranks that are culprits, by kind, unseen ones first."""
    if silences:
        return "; ".join(
            f"no message from node {node} (host {silence.host}) for {silence.seconds:.0f} s"
            for node, silence in sorted(silences.items())
        )
    culprits: dict[DiagnosisKind, list[ProcessView]] = {}
    for view, diagnosis in zip(views, diagnoses, strict=True):
        if diagnosis.is_culprit and view.is_rank:
            culprits.setdefault(diagnosis.kind, []).append(view)
    ordered = sorted(culprits.items(), key=lambda item: item[0] != DiagnosisKind.UNSEEN)
    return "; ".join(_culprits_text(kind, ranks) for kind, ranks in ordered)


def _culprits_text(kind: DiagnosisKind, views: Sequence[ProcessView]) -> str:
    ranks = ranks_text([view.rank for view in views])
    are, have = ("is", "has") if len(views) == 1 else ("are", "have")
    texts = {
        DiagnosisKind.UNSEEN: f"no contact with {ranks}",
        DiagnosisKind.NOT_STARTED: f"{ranks} {have} not started",
        DiagnosisKind.DEAD: f"{ranks} {have} died",
        DiagnosisKind.FAILED: f"{ranks} {have} failed",
    }
    text = texts.get(kind, f"{ranks} {are} {kind}")
    if len(views) > 1 or kind in (DiagnosisKind.UNSEEN, DiagnosisKind.NOT_STARTED):
        return text
    reading = views[0].reading
    # The phase of the device is shown only for a stuck rank: it does not explain why a rank died or was stopped.
    position = reading if kind is not DiagnosisKind.STUCK or reading.device is None else reading.device
    phase = "" if position.phase.is_final else f" in {position.phase.name}"
    return f"{text}{phase}" + ("" if position.step is None else f", step {position.step}")
