"""The diagnosis of one process: its kind, the reason, and whether the process caused the run to stop."""

import signal
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from nestguard.diagnose.stall_limits import StallLimits
from nestguard.observe.process import signal_name
from nestguard.observe.view import Phase, ProcessState, ProcessView, ranks_text


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

WATCHDOG = "probably NCCL's watchdog: a collective took longer than the timeout of the process group"

_FINAL_KINDS = {
    Phase.FAILED: DiagnosisKind.FAILED,
    Phase.DONE: DiagnosisKind.DONE,
    Phase.LEAVING: DiagnosisKind.LEAVING,
}
_KINDS = {
    ProcessState.ZOMBIE: DiagnosisKind.DEAD,
    ProcessState.GONE: DiagnosisKind.DEAD,
    ProcessState.STOPPED: DiagnosisKind.STOPPED,
    ProcessState.NOT_STARTED: DiagnosisKind.NOT_STARTED,
    ProcessState.UNSEEN: DiagnosisKind.UNSEEN,
}


def waits_for_ranks(view: ProcessView) -> bool:
    """Returns whether a rank waits for other ranks.

    A device does so in the phase COLLECTIVE only. Without a known device, the process may wait in the backward pass as
    well, because DDP starts its all-reduces there.
    """
    if view.reading.device is None:
        return view.reading.phase in (Phase.BACKWARD, Phase.COLLECTIVE)
    return view.reading.device.phase is Phase.COLLECTIVE


def own_diagnosis(view: ProcessView) -> Diagnosis:
    """Returns the diagnosis of a process without regard to the others; it is not a culprit."""
    if view.reading.phase.is_final:
        return Diagnosis(_FINAL_KINDS[view.reading.phase], view.reading.detail)
    kind = _KINDS.get(view.state, DiagnosisKind.RUNNING)
    return Diagnosis(kind, contact_reason(view) if view.is_unseen else "")


def culprit(view: ProcessView, reason: str) -> Diagnosis:
    """Returns the diagnosis of a culprit: stuck, unless it has a problem of its own, such as being dead."""
    kind = own_diagnosis(view).kind
    return Diagnosis(DiagnosisKind.STUCK if kind is DiagnosisKind.RUNNING else kind, reason, True)


def waiting(ranks: str) -> Diagnosis:
    """Returns the diagnosis of a rank that waits for others, for example for `ranks 1-2`."""
    return Diagnosis(DiagnosisKind.WAITING, f"for {ranks}")


def cuts_suffix(view: ProcessView) -> str:
    """Returns which cuts a process is loading, and the URL that it waits for; empty unless it is loading."""
    cuts = view.reading.cuts
    if not cuts or view.reading.phase is not Phase.LOADING:
        return ""
    if view.reading.waits_for is not None:
        return f", at cut {cuts[0]}, waiting for {view.reading.waits_for}"
    return f", at cut {cuts[0]}" if len(cuts) == 1 else f", at one of {len(cuts)} cuts (first: {cuts[0]})"


def absent_ranks_suffix(ranks: Sequence[ProcessView]) -> str:
    """Returns which ranks no longer take part, for which others may be waiting; empty if there are none."""
    done = [view.rank for view in ranks if view.reading.phase in (Phase.DONE, Phase.LEAVING)]
    return f"; already ended: {ranks_text(done)}" if done else ""


def progress_text(view: ProcessView) -> str:
    """Returns the phase of a process as text; the phase of its device comes first if it is another one."""
    reading, device = view.reading, view.reading.device
    if device is None or device == (reading.phase, reading.step, reading.microbatch):
        return f"in {reading.phase.name}"
    step = "" if device.step is None else f" of step {device.step}"
    return f"device in {device.phase.name}{step}; host in {reading.phase.name}"


def silence_reason(view: ProcessView, limits: StallLimits) -> str:
    """Explains a process that writes no heartbeat: phase, duration, limit, and the cuts that it is loading."""
    if view.state is ProcessState.NOT_STARTED:
        return f"no heartbeat within {view.age_s:.0f} s"
    blocked = ", blocked in the kernel (disk or network file system)" if view.state is ProcessState.BLOCKED else ""
    duration = f"{view.age_s:.0f} s (limit {limits.limit_of(view.reading):g} s)"
    return f"{progress_text(view)} for {duration}{blocked}{cuts_suffix(view)}"


def contact_reason(view: ProcessView) -> str:
    """Explains why nothing is known about a process."""
    if not view.ended_s:
        return "no heartbeat was ever received"
    return f"no contact between the monitors of the nodes for {view.ended_s:.0f} s"


def end_reason(view: ProcessView) -> str:
    """Explains the end of a process that died or failed."""
    if not view.is_dead:
        step = view.reading.step
        return view.reading.detail or ("before its first step" if step is None else f"in step {step}")
    number = view.exit_signal
    if number is None:
        end = "without reporting an error (SIGKILL, out of memory or a crash)"
    elif number == signal.SIGKILL:
        end = "by SIGKILL (out of memory, or another process sent it)"
    elif number == signal.SIGABRT:
        silence = f"after {view.age_s - view.ended_s:.0f} s without a heartbeat"
        end = f"by SIGABRT, {silence}. With NCCL, this is {WATCHDOG}; its message names the collective"
    else:
        end = f"by {signal_name(number)}"
    return f"ended in {view.reading.phase.name} {end}{cuts_suffix(view)}"
