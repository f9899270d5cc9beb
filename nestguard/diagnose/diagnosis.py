"""The diagnosis of one process: its kind, the reason, and whether the process caused the run to stop."""

from enum import StrEnum
from typing import NamedTuple

from nestguard.diagnose.reasons import contact_reason
from nestguard.observe.process import ProcessState
from nestguard.observe.record import Phase
from nestguard.observe.view import ProcessView


class DiagnosisKind(StrEnum):
    """What is wrong with a process, or what it does if nothing is wrong with it."""

    STUCK = "stuck"
    STOPPED = "stopped"
    DEAD = "dead"
    FAILED = "failed"
    SILENT = "silent"
    """The monitor of its node is connected but sends no messages."""

    UNSEEN = "unseen"
    """There is no contact with its node."""

    NOT_STARTED = "not started"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    LEAVING = "leaving"


class Diagnosis(NamedTuple):
    """Diagnosis of one process."""

    kind: DiagnosisKind
    reason: str = ""
    """Explanation that follows the kind in the table; may be empty."""

    is_culprit: bool = False
    """Whether the process caused the run to stop."""


Diagnoses = dict[str, Diagnosis]
"""Diagnoses by the name of the process."""

WAITING_PHASES = (Phase.BACKWARD, Phase.COLLECTIVE)
"""Phases in which a rank waits for other ranks. DDP starts its all-reduces during the backward pass."""


def waits_for_ranks(view: ProcessView) -> bool:
    """Returns whether a rank waits for other ranks. A device that is known does so only in the phase COLLECTIVE."""
    device = view.reading.device
    return view.reading.phase in WAITING_PHASES if device is None else device.phase is Phase.COLLECTIVE


def own_diagnosis(view: ProcessView) -> Diagnosis:
    """Returns the diagnosis of a process without regard to the others; it is not a culprit."""
    if view.reading.phase is Phase.FAILED:
        return Diagnosis(DiagnosisKind.FAILED, view.reading.detail)
    if view.is_dead:
        return Diagnosis(DiagnosisKind.DEAD)
    if view.reading.phase is Phase.DONE:
        return Diagnosis(DiagnosisKind.DONE, view.reading.detail)
    if view.reading.phase is Phase.LEAVING:
        return Diagnosis(DiagnosisKind.LEAVING, view.reading.detail)
    if view.state is ProcessState.STOPPED:
        return Diagnosis(DiagnosisKind.STOPPED)
    if view.state is ProcessState.NOT_STARTED:
        return Diagnosis(DiagnosisKind.NOT_STARTED)
    if view.is_unseen:
        return Diagnosis(DiagnosisKind.UNSEEN, contact_reason(view))
    return Diagnosis(DiagnosisKind.RUNNING)


def culprit(view: ProcessView, reason: str) -> Diagnosis:
    """Returns the diagnosis of a culprit: stuck, unless it has a problem of its own, such as being dead."""
    kind = own_diagnosis(view).kind
    return Diagnosis(DiagnosisKind.STUCK if kind is DiagnosisKind.RUNNING else kind, reason, True)


def waiting(ranks: str) -> Diagnosis:
    """Returns the diagnosis of a rank that waits for others, for example for `ranks 1-2`."""
    return Diagnosis(DiagnosisKind.WAITING, f"for {ranks}")
