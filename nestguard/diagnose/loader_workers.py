"""Finds the loader workers that keep a rank stuck in loading."""

from collections.abc import Sequence

from nestguard.diagnose.diagnosis import Diagnoses, Diagnosis, DiagnosisKind
from nestguard.diagnose.limits import StallLimits
from nestguard.diagnose.reasons import cuts_suffix
from nestguard.observe.process import ProcessState
from nestguard.observe.record import Phase
from nestguard.observe.view import ProcessView


def add_worker_culprits(diagnoses: Diagnoses, views: Sequence[ProcessView], limits: StallLimits) -> None:
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
