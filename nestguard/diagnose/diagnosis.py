"""The diagnosis of one process: its kind, the reason, and whether the process caused the run to stop."""

import signal
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from nestguard.diagnose.limits import StallLimits
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


WATCHDOG = "probably NCCL's watchdog, because a collective took longer than the timeout of the process group"


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
    done = [view.rank for view in ranks if view.reading.phase is Phase.DONE]
    leaving = [view.rank for view in ranks if view.reading.phase is Phase.LEAVING]
    text = f"; already done: {ranks_text(done)}" if done else ""
    return text + (f"; asked to stop: {ranks_text(leaving)}" if leaving else "")


def device_text(view: ProcessView) -> str:
    """Returns what the device of a rank executes, for example `device in BACKWARD of step 10, microbatch 1`."""
    device = view.reading.device
    if device is None:
        return ""
    step = "" if device.step is None else f" of step {device.step}"
    is_in_microbatch = device.phase in (Phase.LOADING, Phase.FORWARD, Phase.BACKWARD)
    microbatch = f", microbatch {device.microbatch}" if is_in_microbatch and device.microbatch is not None else ""
    return f"device in {device.phase.name}{step}{microbatch}"


def differs_from_device(view: ProcessView) -> bool:
    """Returns whether the device of a rank executes another phase than that of the process."""
    reading = view.reading
    return reading.device is not None and reading.device != (reading.phase, reading.step, reading.microbatch)


def progress_text(view: ProcessView) -> str:
    """Returns where a rank is: the phase of its process and, if that is another one, of its device."""
    device = f"{device_text(view)}; host " if differs_from_device(view) else ""
    return f"{device}in {view.reading.phase.name}"


def silence_reason(view: ProcessView, limits: StallLimits) -> str:
    """Explains a process that writes no heartbeat: phase, duration, limit, and the cuts that it is loading."""
    if view.state is ProcessState.NOT_STARTED:
        return f"no heartbeat within {view.age_s:.0f} s"
    limit = limits.limit_of(view.reading)
    blocked = ", blocked in the kernel (disk or network file system)" if view.state is ProcessState.BLOCKED else ""
    where = f"{device_text(view)}; host waits in" if differs_from_device(view) else "in"
    return f"{where} {view.reading.phase.name} for {view.age_s:.0f} s (limit {limit:g} s){blocked}{cuts_suffix(view)}"


def stopped_reason(view: ProcessView) -> str:
    """Explains a process in the operating system's state "stopped"."""
    return f"by SIGSTOP, a terminal or a debugger, in {view.reading.phase.name}; silent for {view.age_s:.0f} s"


def behind_reason(view: ProcessView, waited_s: float) -> str:
    """Explains a rank that is behind although it sends heartbeats."""
    device = f" ({device_text(view)})" if differs_from_device(view) else ""
    return (
        f"sends heartbeats in {view.reading.phase.name} but is behind{device}: other ranks have waited {waited_s:.0f} s"
    )


def same_collective_reason(view: ProcessView, num_known: int) -> str:
    """Explains a stall in which all known ranks are in the same collective or backward pass."""
    where = "collective" if view.reading.actual_phase is Phase.COLLECTIVE else "backward pass"
    causes = "the network, or a rank that called a collective with another operation or shape"
    if num_known < view.reading.identity.world_size:
        return f"all known ranks are in the same {where}; possible causes: a rank that is not known, {causes}"
    return f"all ranks are in the same {where}; possible causes: {causes}"


def contact_reason(view: ProcessView) -> str:
    """Explains why nothing is known about a process."""
    if not view.ended_s:
        return "no heartbeat was ever received"
    return f"no contact between the monitors of the nodes for {view.ended_s:.0f} s"


def end_reason(view: ProcessView) -> str:
    """Explains the end of a process that died or failed."""
    if view.is_dead:
        return f"ended in {view.reading.phase.name} {_death_text(view)}{cuts_suffix(view)}"
    if view.reading.detail:
        return view.reading.detail
    return "before its first step" if view.reading.step is None else f"in step {view.reading.step}"


def _death_text(view: ProcessView) -> str:
    number = view.exit_signal
    if number is None:
        return "without reporting an error (SIGKILL, out of memory or a crash)"
    if number == signal.SIGABRT:
        return (
            f"by SIGABRT, after {view.age_s - view.ended_s:.0f} s without a heartbeat. With NCCL, this is {WATCHDOG}; "
            "its message on standard error names the collective. Find out which rank was missing in it, or raise the "
            "timeout of the strategy"
        )
    name = signal_name(number)
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
        return f"by {name} (a crash in native code)"
    return f"by {name}" + (" (out of memory, or another process sent it)" if number == signal.SIGKILL else "")
