"""Diagnoses a whole run: whether it has to be stopped, why, and which processes are the culprits.

Two conditions stop a run: a rank that has died or failed, and a rank that has been silent for longer than its limit.
When ranks are silent, the rank with the least progress holds up the others, unless a rank is stopped or has skipped a
collective. A rank without contact never stops a run by itself; it is a culprit if all others wait. All functions are
pure: they depend on the given views only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from nestguard.diagnose.diagnosis import Diagnosis, DiagnosisKind, own_diagnosis
from nestguard.diagnose.failures import diagnose_failures
from nestguard.diagnose.limits import StallLimits
from nestguard.diagnose.loader_workers import add_worker_culprits
from nestguard.diagnose.reasons import ranks_text
from nestguard.diagnose.stalls import diagnose_silent_nodes, diagnose_stall, limits_beside_silence
from nestguard.observe.process import ProcessState
from nestguard.observe.record import Phase
from nestguard.observe.view import NodeSilence, ProcessView


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
        limits: How long a process may be silent.
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
    add_worker_culprits(found, views, limits)
    diagnoses = tuple(found.get(view.name, own_diagnosis(view)) for view in views)
    return RunDiagnosis(must_stop, _cause(views, diagnoses, causal_silences) if must_stop else "", diagnoses)


def may_stop_run(phase: Phase, state: ProcessState, age_s: float, *, has_stepped: bool, limits: StallLimits) -> bool:
    """Returns whether a rank may be a reason to stop the run. `diagnose` does not stop a run without such a rank.

    Args:
        phase: Current phase of the rank.
        state: State of its process.
        age_s: Seconds since its last heartbeat.
        has_stepped: Whether it has finished a step since its start.
        limits: Result of `quick_limits`.
    """
    if phase is Phase.FAILED:
        return True
    if phase.is_final or state is ProcessState.UNSEEN:
        return False
    return state.has_ended or age_s > limits.limit_in(phase, has_stepped=has_stepped)


def view_may_stop_run(view: ProcessView, limits: StallLimits) -> bool:
    """Returns `may_stop_run` of a view; False for a loader worker."""
    reading = view.reading
    return view.is_rank and may_stop_run(
        reading.phase, view.state, view.age_s, has_stepped=reading.has_stepped, limits=limits
    )


def quick_limits(limits: StallLimits, silences: Mapping[int, NodeSilence]) -> StallLimits:
    """Returns the limits for `may_stop_run`: lower ones if a node is silent."""
    return limits_beside_silence(limits) if too_long(silences, limits) else limits


def too_long(silences: Mapping[int, NodeSilence], limits: StallLimits) -> dict[int, NodeSilence]:
    """Returns the nodes that have been silent for longer than the limit."""
    return {node: silence for node, silence in silences.items() if silence.seconds > limits.node_silence_s}


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
