import signal
from dataclasses import replace
from typing import Any

import pytest

from nestguard import Phase
from nestguard.diagnose.diagnosis import Diagnosis, DiagnosisKind
from nestguard.diagnose.run_diagnosis import diagnose
from nestguard.observe.view import DevicePosition, ProcessState, ProcessView
from tests.nestguard.diagnose.diagnoses import LIMITS, continuing, culprits, diagnoses_of, kinds, unseen
from tests.nestguard.views import view


def test_a_death_stops_the_run_after_half_a_second() -> None:
    gone = view(1, state=ProcessState.GONE, ended_s=0.1)
    assert continuing(view(0, Phase.COLLECTIVE), gone) == ["waiting", "dead"]
    diagnoses = diagnoses_of(view(0, Phase.COLLECTIVE), view(1, state=ProcessState.ZOMBIE, ended_s=0.6))
    assert kinds(diagnoses) == ["waiting", "dead"]
    assert culprits(diagnoses) == [1]
    assert diagnoses[1].reason == "ended in FORWARD without reporting an error (SIGKILL, out of memory or a crash)"


def test_the_cause_names_what_the_process_of_a_dead_rank_did_and_not_its_device() -> None:
    device = DevicePosition(Phase.BACKWARD, 10, 0)
    dead = view(1, Phase.LOADING, 11, state=ProcessState.GONE, ended_s=0.6, device=device)
    run = diagnose([view(0, Phase.COLLECTIVE, 11), dead], LIMITS)
    assert run.cause == "rank 1 has died in LOADING, step 11"


def test_a_failed_rank_has_two_seconds_to_exit() -> None:
    assert continuing(view(0), view(1, Phase.FAILED, age_s=1.9)) == ["running", "failed"]
    diagnoses = diagnoses_of(view(0), view(1, Phase.FAILED, age_s=2.1, detail="ValueError: no"))
    assert diagnoses[1] == Diagnosis(DiagnosisKind.FAILED, "ValueError: no", True)


def test_an_error_that_is_reported_just_before_a_death_is_detected_is_a_consequence() -> None:
    diagnoses = diagnoses_of(
        view(0, Phase.FAILED, age_s=0.65, detail="connection reset"), view(1, state=ProcessState.GONE, ended_s=0.6)
    )
    assert kinds(diagnoses) == ["failed", "dead"]
    assert culprits(diagnoses) == [1]
    assert diagnoses[0].reason == "after rank 1: connection reset"


@pytest.mark.parametrize(
    ("number", "last_beat_s", "first"),
    [(signal.SIGKILL, 0.91, 1), (None, 0.91, 1), (signal.SIGKILL, 0.89, 0), (signal.SIGABRT, 0.91, 0)],
)
@pytest.mark.parametrize("has_exited", [False, True])
def test_a_death_comes_before_the_errors_after_its_last_heartbeat_however_late_it_is_noticed(
    number: int | None, last_beat_s: float, first: int, has_exited: bool
) -> None:
    state = ProcessState.ZOMBIE if has_exited else ProcessState.RUNNING
    failed = view(0, Phase.FAILED, age_s=0.9, state=state, ended_s=0.5 * has_exited, detail="connection reset")
    dead = view(1, age_s=last_beat_s, state=ProcessState.GONE, ended_s=0.5, exit_signal=number)
    diagnoses = diagnoses_of(failed, dead)
    assert culprits(diagnoses) == [first]
    assert diagnoses[1 - first].reason.startswith(f"after rank {first}")


def test_a_death_after_a_failure_is_a_consequence() -> None:
    diagnoses = diagnoses_of(
        view(0, Phase.FAILED, age_s=1.2, state=ProcessState.GONE, ended_s=0.8, detail="ValueError: no"),
        view(1, age_s=2, state=ProcessState.GONE, ended_s=0.6),
    )
    assert culprits(diagnoses) == [0]
    assert diagnoses[1].reason == "after rank 0"


def test_a_rank_that_skipped_a_collective_is_the_culprit_for_ranks_that_break_in_it() -> None:
    broken = view(0, Phase.COLLECTIVE, 5, state=ProcessState.GONE, ended_s=0.6)
    skipper = view(1, Phase.BACKWARD, 6, collectives=5)
    diagnoses = diagnoses_of(broken, skipper)
    assert kinds(diagnoses) == ["dead", "stuck"]
    assert culprits(diagnoses) == [1]
    assert diagnoses[0].reason == "after rank 1"
    failed = view(1, Phase.FAILED, 6, age_s=0.5, last_phase=Phase.BACKWARD, collectives=5, detail="connection reset")
    diagnoses = diagnoses_of(broken, failed)
    assert kinds(diagnoses) == ["dead", "failed"]
    assert culprits(diagnoses) == [1]
    assert diagnoses[1].reason.startswith("skipped a collective: it has entered 5")
    assert diagnoses[1].reason.endswith("; then failed: connection reset")
    alone = diagnoses_of(view(0, Phase.COLLECTIVE, 5), replace(failed, age_s=2.1))
    assert culprits(alone) == [1]
    assert alone[1].reason.endswith("; then failed: connection reset")


def test_a_rank_that_fails_before_a_collective_has_not_skipped_it() -> None:
    failed = view(1, Phase.FAILED, 5, age_s=2.1, last_phase=Phase.FORWARD, collectives=5, detail="ValueError: no")
    assert diagnoses_of(view(0, Phase.COLLECTIVE, 5), failed)[1] == Diagnosis(
        DiagnosisKind.FAILED, "ValueError: no", True
    )


def test_a_node_whose_contact_was_lost_shortly_before_a_failure_is_a_culprit_as_well() -> None:
    failed = view(0, Phase.FAILED, 5, age_s=2.1, last_phase=Phase.COLLECTIVE, detail="connection closed")
    run = diagnose([failed, unseen(1, ended_s=3)], LIMITS)
    assert culprits(run.diagnoses) == [0, 1]
    assert run.cause == "no contact with rank 1; rank 0 has failed, step 5"
    assert run.diagnoses[1].reason == "no contact between the monitors of the nodes for 3 s"
    assert culprits(diagnose([failed, unseen(1, ended_s=500)], LIMITS).diagnoses) == [0]


def test_ranks_that_are_done_or_leaving_may_exit() -> None:
    done = view(0, Phase.DONE, age_s=5000, state=ProcessState.GONE, ended_s=5000)
    leaving = view(1, Phase.LEAVING, age_s=5000, state=ProcessState.ZOMBIE, ended_s=5000)
    assert continuing(done, leaving, view(2)) == ["done", "leaving", "running"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, "by SIGKILL (out of memory, or another process sent it)"),
        (signal.SIGSEGV, "by SIGSEGV"),
        (60, "by signal 60"),
    ],
)
def test_a_death_has_its_signal_if_that_is_known(number: int, text: str) -> None:
    gone = view(1, state=ProcessState.ZOMBIE, ended_s=0.6, exit_signal=number)
    assert diagnoses_of(view(0, Phase.COLLECTIVE), gone)[1].reason == f"ended in FORWARD {text}"


def aborted(rank: int, phase: Phase, waited_s: float, **other: Any) -> ProcessView:
    return view(
        rank,
        phase,
        age_s=waited_s + 0.6,
        state=ProcessState.GONE,
        ended_s=0.6,
        exit_signal=signal.SIGABRT,
        **other,
    )


def test_an_abort_is_explained_by_its_probable_cause() -> None:
    assert diagnoses_of(view(0, Phase.COLLECTIVE), aborted(1, Phase.COLLECTIVE, 100))[1].reason.startswith(
        "ended in COLLECTIVE by SIGABRT, after 100 s without a heartbeat. With NCCL, this is probably NCCL's watchdog"
    )


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_rank_for_which_an_aborted_rank_had_long_waited_is_the_culprit(is_aborted: bool) -> None:
    device = DevicePosition(Phase.BACKWARD, 5, 1)
    behind = view(1, Phase.COLLECTIVE, age_s=251, device=device)
    if is_aborted:
        behind = replace(behind, state=ProcessState.GONE, ended_s=0.5, exit_signal=signal.SIGABRT)
    waited = aborted(0, Phase.COLLECTIVE, 250, device=DevicePosition(Phase.COLLECTIVE, 5, 1))
    diagnoses = diagnoses_of(waited, behind)
    assert culprits(diagnoses) == [1]
    assert diagnoses[1].kind is (DiagnosisKind.DEAD if is_aborted else DiagnosisKind.STUCK)
    assert diagnoses[1].reason.startswith(
        "device in BACKWARD of step 5; host in COLLECTIVE; rank 0, which had waited 250 s for this rank, was ended by "
        "SIGABRT: probably NCCL's watchdog"
    )
    assert diagnoses[0].reason == "after rank 1"


def test_an_abort_without_a_long_wait_for_others_is_the_cause_itself() -> None:
    behind = view(1, Phase.FORWARD, age_s=251)
    assert culprits(diagnoses_of(aborted(0, Phase.COLLECTIVE, 100), behind)) == [0]
    assert culprits(diagnoses_of(aborted(0, Phase.FORWARD, 250, microbatch=1), behind)) == [0]
