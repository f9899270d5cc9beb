"""Diagnoses a whole run: whether it has to be stopped, why, and which processes are the culprits.

Two conditions stop a run: a rank that has died or failed, and a rank that has written no heartbeat for longer than its
limit. Of several such ranks, the one with the least progress holds up the others, unless a rank is stopped or has
skipped a collective. A rank without contact never stops a run by itself; it is a culprit if all others wait. All
functions are pure: they depend on the given views only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from nestguard.diagnose.diagnosis import Diagnoses, Diagnosis, DiagnosisKind, cuts_suffix, own_diagnosis
from nestguard.diagnose.failures import diagnose_failures
from nestguard.diagnose.limits import StallLimits, too_long
from nestguard.diagnose.stalls import diagnose_silent_nodes, diagnose_stall
from nestguard.observe.view import NodeSilence, Phase, ProcessState, ProcessView, ranks_text


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
    found, must_stop = diagnose_failures(ranks, limits)
    causal_silences: Mapping[int, NodeSilence] = {}
    if not found:
        found = diagnose_silent_nodes(ranks, limits, silences)
        causal_silences = silences if found else {}
        found = found or diagnose_stall(ranks, limits, silences)
        must_stop = bool(found)
    _add_worker_culprits(found, views, limits)
    diagnoses = tuple(_with_own_words(view, found.get(view.name, own_diagnosis(view))) for view in views)
    return RunDiagnosis(must_stop, _cause(views, diagnoses, causal_silences) if must_stop else "", diagnoses)


def _with_own_words(view: ProcessView, diagnosis: Diagnosis) -> Diagnosis:
    """Adds what a running rank has said about itself."""
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


def _cause(views: Sequence[ProcessView], diagnoses: Sequence[Diagnosis], silences: Mapping[int, NodeSilence]) -> str:
    """Returns the cause in one line: the silent nodes, or the ranks that are culprits, by kind, unseen ones first."""
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
    if kind is DiagnosisKind.UNSEEN:
        return f"no contact with {ranks}"
    is_one, view = len(views) == 1, views[0]
    are, have = ("is", "has") if is_one else ("are", "have")
    verbs = {
        DiagnosisKind.DEAD: f"{have} died",
        DiagnosisKind.FAILED: f"{have} failed",
        DiagnosisKind.NOT_STARTED: f"{have} not started",
    }
    verb = verbs.get(kind, f"{are} {kind}")
    if not is_one or kind is DiagnosisKind.NOT_STARTED:
        return f"{ranks} {verb}"
    reading = view.reading
    if kind is DiagnosisKind.STUCK and reading.device is not None:
        return f"{ranks} {verb} in {reading.device.phase.name}" + _step_text(reading.device.step)
    phase = f" in {reading.phase.name}" if not reading.phase.is_final else ""
    return f"{ranks} {verb}{phase}" + _step_text(reading.step)


def _step_text(step: int | None) -> str:
    return "" if step is None else f", step {step}"


def _add_worker_culprits(diagnoses: Diagnoses, views: Sequence[ProcessView], limits: StallLimits) -> None:
    """Adds loader workers that are culprits to `diagnoses`, in place, and names them in the reason of their rank."""
    stuck_ranks = {
        view.rank: view
        for view in views
        if view.is_rank and view.reading.actual_phase is Phase.LOADING and _is_stuck(diagnoses.get(view.name))
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


def _is_stuck(diagnosis: Diagnosis | None) -> bool:
    return diagnosis is not None and diagnosis.kind is DiagnosisKind.STUCK


def _diagnose_worker(view: ProcessView, rank: ProcessView, limits: StallLimits) -> Diagnosis | None:
    """Returns the diagnosis of a worker that is a culprit; None for any other worker."""
    silent = f"silent for {view.age_s:.0f} s{cuts_suffix(view)}"
    if view.is_dead:
        # A worker that died long before the rank got stuck belonged to an earlier epoch.
        is_recent = view.ended_s < rank.age_s + limits.step_s
        reason = f"ended without reporting an error{cuts_suffix(view)}"
        return Diagnosis(DiagnosisKind.DEAD, reason, True) if is_recent else None
    if view.state is ProcessState.STOPPED:
        return Diagnosis(DiagnosisKind.STOPPED, silent, True)
    is_late = view.age_s > limits.limit_of(rank.reading) / 2
    # A worker without cuts is idle: it waits for its rank to request a batch.
    return Diagnosis(DiagnosisKind.STUCK, silent, True) if view.is_live and view.reading.cuts and is_late else None
