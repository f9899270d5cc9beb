"""Diagnoses of whole runs, from the views of their processes."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestguard import Phase, StallLimits
from nestguard.diagnose.diagnosis import Diagnosis, DiagnosisKind
from nestguard.diagnose.run_diagnosis import diagnose
from nestguard.observe.view import DevicePosition, NodeSilence, ProcessState, ProcessView
from tests.nestguard.views import view

LIMITS = StallLimits(step_s=300, first_step_s=900, validation_s=900, checkpoint_s=900, finishing_s=300)


def diagnoses_of(*views: ProcessView) -> tuple[Diagnosis, ...]:
    """Returns the diagnoses of a run that has to be stopped."""
    run = diagnose(views, LIMITS)
    assert run.must_stop
    assert run.cause
    return run.diagnoses


def continuing(*views: ProcessView) -> list[str]:
    """Returns the kinds of the diagnoses of a run that does not have to be stopped."""
    run = diagnose(views, LIMITS)
    assert not run.must_stop
    assert run.cause == ""
    return kinds(run.diagnoses)


def kinds(diagnoses: Sequence[Diagnosis]) -> list[str]:
    return [str(diagnosis.kind) for diagnosis in diagnoses]


def culprits(diagnoses: Sequence[Diagnosis]) -> list[int]:
    """Returns the indices of the culprits."""
    return [index for index, diagnosis in enumerate(diagnoses) if diagnosis.is_culprit]


def unseen(rank: int, ended_s: float = 0.0) -> ProcessView:
    """Returns a rank without contact; `ended_s` is the time since contact was lost, 0 if there never was any."""
    return view(rank, Phase.STARTING, None, 0.0, state=ProcessState.UNSEEN, ended_s=ended_s)


def test_ranks_within_their_limits_are_running() -> None:
    assert continuing(view(0, age_s=299), view(1, Phase.COLLECTIVE, age_s=299)) == ["running", "running"]


def test_the_rank_with_the_least_progress_is_stuck_and_ranks_in_a_collective_wait_for_it() -> None:
    diagnoses = diagnoses_of(view(0, Phase.COLLECTIVE, age_s=301), view(1, Phase.FORWARD, age_s=302))
    assert kinds(diagnoses) == ["waiting", "stuck"]
    assert diagnoses[0].reason == "for rank 1"
    assert diagnoses[1].reason == "in FORWARD for 302 s (limit 300 s)"


def test_an_earlier_microbatch_is_less_progress_in_any_phase() -> None:
    behind = view(1, Phase.BACKWARD, age_s=302, microbatch=1)
    ahead = view(0, Phase.LOADING, age_s=10, microbatch=2)
    assert kinds(diagnoses_of(ahead, behind)) == ["running", "stuck"]


def test_the_collective_of_a_step_comes_after_all_its_microbatches() -> None:
    behind = view(1, Phase.BACKWARD, age_s=302, microbatch=7)
    ahead = view(0, Phase.COLLECTIVE, age_s=302, microbatch=0)
    assert kinds(diagnoses_of(ahead, behind)) == ["waiting", "stuck"]


def test_several_ranks_with_equally_little_progress_are_all_stuck() -> None:
    diagnoses = diagnoses_of(
        view(0, Phase.COLLECTIVE, age_s=301), view(1, age_s=301), view(2, age_s=290), view(3, age_s=2)
    )
    assert kinds(diagnoses) == ["waiting", "stuck", "stuck", "running"]
    assert diagnoses[0].reason == "for ranks 1-2"


def test_all_ranks_in_the_same_collective_are_stuck() -> None:
    diagnoses = diagnoses_of(view(0, Phase.COLLECTIVE, age_s=301), view(1, Phase.COLLECTIVE, age_s=299))
    assert kinds(diagnoses) == ["stuck", "stuck"]
    assert diagnoses[0].reason.startswith("in COLLECTIVE like all known ranks; possible causes: the network")


def test_a_rank_with_equal_progress_and_fewer_collectives_has_skipped_one() -> None:
    diagnoses = diagnoses_of(
        view(0, Phase.COLLECTIVE, age_s=301, collectives=6), view(1, Phase.COLLECTIVE, age_s=301, collectives=5)
    )
    assert kinds(diagnoses) == ["waiting", "stuck"]
    assert diagnoses[1].reason.startswith("skipped a collective: it has entered 5")


def test_without_counted_collectives_no_rank_has_skipped_one() -> None:
    diagnoses = diagnoses_of(view(0, step=6, age_s=301, collectives=0), view(1, step=5, age_s=301, collectives=0))
    assert culprits(diagnoses) == [1]


def test_a_rank_that_is_behind_with_fewer_collectives_has_not_skipped_one() -> None:
    diagnoses = diagnoses_of(
        view(0, Phase.COLLECTIVE, age_s=301, collectives=6), view(1, Phase.BACKWARD, age_s=301, collectives=5)
    )
    assert diagnoses[1].reason.startswith("in BACKWARD")


def test_extra_collectives_in_validation_do_not_make_a_rank_behind_a_skipper() -> None:
    behind = view(0, Phase.FORWARD, 5, age_s=301, collectives=5)
    after_validation = view(1, Phase.COLLECTIVE, 6, age_s=301, collectives=8)
    assert kinds(diagnoses_of(behind, after_validation)) == ["stuck", "waiting"]


def test_a_stopped_rank_is_the_culprit_whatever_its_progress() -> None:
    stopped = view(0, Phase.COLLECTIVE, age_s=301, state=ProcessState.STOPPED)
    diagnoses = diagnoses_of(stopped, view(1, Phase.COLLECTIVE, age_s=301))
    assert kinds(diagnoses) == ["stopped", "waiting"]


def test_ranks_that_wait_for_a_checkpoint_have_the_limit_of_the_checkpoint() -> None:
    saving = view(0, Phase.CHECKPOINT, 4, age_s=310)
    assert continuing(saving, view(1, Phase.COLLECTIVE, 5, age_s=305)) == ["running", "running"]
    late = view(0, Phase.CHECKPOINT, 4, age_s=901)
    assert kinds(diagnoses_of(late, view(1, Phase.COLLECTIVE, 5, age_s=896))) == ["stuck", "waiting"]


def test_a_rank_that_is_behind_but_sends_heartbeats_is_the_culprit_if_nothing_else_explains_the_stall() -> None:
    diagnoses = diagnoses_of(view(0, Phase.COLLECTIVE, age_s=1201), view(1, Phase.LOADING, age_s=3))
    assert kinds(diagnoses) == ["waiting", "stuck"]
    assert diagnoses[1].reason == "in LOADING with heartbeats, but other ranks have waited 1201 s"


def test_others_may_wait_longer_for_a_rank_that_has_just_written_a_slow_checkpoint() -> None:
    others = view(1, Phase.COLLECTIVE, 5, age_s=850), view(2, Phase.BACKWARD, 5, age_s=850)
    assert continuing(view(0, Phase.CHECKPOINT, 4, age_s=850), *others) == ["running"] * 3
    assert continuing(view(0, Phase.LOADING, 5, age_s=0), *others) == ["running"] * 3
    assert continuing(view(0, Phase.FORWARD, 5, age_s=299), *others) == ["running"] * 3
    assert kinds(diagnoses_of(view(0, Phase.FORWARD, 5, age_s=301), *others)) == ["stuck", "waiting", "waiting"]


def test_a_rank_that_is_behind_but_sends_heartbeats_is_running_if_another_is_late_in_loading() -> None:
    diagnoses = diagnoses_of(view(0, Phase.LOADING, 6, age_s=301), view(1, Phase.FORWARD, 5, age_s=3))
    assert kinds(diagnoses) == ["stuck", "running"]


def test_the_first_step_has_its_own_limit() -> None:
    slow = view(0, step=0, age_s=800)
    assert continuing(slow, view(1, Phase.COLLECTIVE, 0, age_s=800)) == ["running", "running"]
    assert kinds(diagnoses_of(view(0, step=0, age_s=901), view(1, Phase.COLLECTIVE, 0, age_s=900))) == [
        "stuck",
        "waiting",
    ]


def test_a_rank_that_never_starts_is_the_culprit_for_ranks_that_wait_at_the_start() -> None:
    missing = view(1, Phase.STARTING, None, age_s=905, state=ProcessState.NOT_STARTED, first_step=None)
    started = view(0, Phase.STARTING, None, age_s=901, first_step=None)
    run = diagnose([started, missing], LIMITS)
    assert run.must_stop
    assert run.cause == "rank 1 has not started"
    assert kinds(run.diagnoses) == ["waiting", "not started"]
    assert culprits(run.diagnoses) == [1]
    assert run.diagnoses[1].reason == "no heartbeat within 905 s"


def test_an_unseen_rank_is_the_culprit_if_all_others_wait() -> None:
    diagnoses = diagnoses_of(view(0, Phase.BACKWARD, age_s=301), unseen(1))
    assert kinds(diagnoses) == ["waiting", "unseen"]
    assert diagnoses[0].reason == "for rank 1"
    assert diagnoses[1] == Diagnosis(DiagnosisKind.UNSEEN, "no heartbeat was ever received", True)
    assert culprits(diagnoses_of(view(0, Phase.FORWARD, age_s=301), unseen(1))) == [0]


def test_unseen_ranks_alone_do_not_stop_a_run() -> None:
    assert continuing(view(0), unseen(1), unseen(2, ended_s=5000)) == ["running", "unseen", "unseen"]


def test_a_rank_without_a_heartbeat_does_not_stop_a_run_that_makes_progress() -> None:
    # Its heartbeat may be in another directory, or could not be written. No step finishes without all ranks.
    missing = view(1, Phase.STARTING, None, age_s=5000, state=ProcessState.NOT_STARTED, first_step=None)
    assert continuing(view(0, step=900), missing) == ["running", "unseen"]
    diagnoses = diagnoses_of(view(0, Phase.COLLECTIVE, 900, age_s=301), missing)
    assert kinds(diagnoses) == ["waiting", "unseen"]


def test_the_reason_of_a_stall_lists_ranks_that_no_longer_take_part() -> None:
    diagnoses = diagnoses_of(view(0, Phase.COLLECTIVE, age_s=301), view(1, Phase.DONE, 9), view(2, Phase.LEAVING, 9))
    assert culprits(diagnoses) == [0]
    assert diagnoses[0].reason.endswith("; already ended: ranks 1-2")


def on_device(rank: int, phase: Phase, step: int = 5, microbatch: int = 0, **other: Any) -> ProcessView:
    """Returns a rank whose process has launched the collective of step 5 and waits for its device."""
    device = DevicePosition(phase, step, microbatch)
    return view(rank, Phase.COLLECTIVE, age_s=301, device=device, **other)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_a_rank_whose_device_is_behind_is_stuck_although_its_process_is_as_far_as_the_others(phase: Phase) -> None:
    run = diagnose([on_device(0, Phase.COLLECTIVE), on_device(1, phase, microbatch=2)], LIMITS)
    assert kinds(run.diagnoses) == ["waiting", "stuck"]
    assert run.cause == f"rank 1 is stuck in {phase.name}, step 5"
    assert run.diagnoses[1].reason == (f"device in {phase.name} of step 5; host in COLLECTIVE for 301 s (limit 300 s)")


def test_a_device_that_does_not_complete_a_collective_is_stuck_if_the_others_do() -> None:
    ahead = view(0, Phase.BACKWARD, 6, age_s=301, device=DevicePosition(Phase.COLLECTIVE, 6, 0))
    diagnoses = diagnoses_of(ahead, on_device(1, Phase.COLLECTIVE))
    assert kinds(diagnoses) == ["waiting", "stuck"]


def test_a_rank_whose_device_is_not_known_is_compared_by_its_process() -> None:
    diagnoses = diagnoses_of(view(0, Phase.COLLECTIVE, age_s=301), on_device(1, Phase.FORWARD))
    assert kinds(diagnoses) == ["waiting", "stuck"]
    diagnoses = diagnoses_of(view(0, Phase.FORWARD, age_s=301), on_device(1, Phase.COLLECTIVE))
    assert kinds(diagnoses) == ["stuck", "waiting"]


def test_a_process_that_launches_less_because_its_device_is_slow_has_not_skipped_a_collective() -> None:
    behind = view(0, Phase.COLLECTIVE, age_s=301, collectives=6, device=DevicePosition(Phase.FORWARD, 5, 0))
    ahead = view(1, Phase.BACKWARD, age_s=301, collectives=5, device=DevicePosition(Phase.BACKWARD, 5, 0))
    assert culprits(diagnoses_of(behind, ahead)) == [0]


def test_a_device_that_hangs_while_its_process_loads_is_no_stall_in_loading() -> None:
    loading = view(1, Phase.LOADING, 6, age_s=301, device=DevicePosition(Phase.FORWARD, 5, 1), cuts=("a",))
    (waiting, stuck) = diagnoses_of(on_device(0, Phase.COLLECTIVE), loading)
    assert (waiting.kind, stuck.kind) == (DiagnosisKind.WAITING, DiagnosisKind.STUCK)
    assert stuck.reason.startswith("device in FORWARD of step 5; host in LOADING for 301 s")


def test_unseen_ranks_are_not_blamed_for_a_device_that_computes() -> None:
    assert culprits(diagnoses_of(on_device(0, Phase.BACKWARD), unseen(1))) == [0]
    assert culprits(diagnoses_of(on_device(0, Phase.COLLECTIVE), unseen(1))) == [1]


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


def test_a_silent_node_does_not_stop_a_run_that_makes_progress() -> None:
    silences = {1: NodeSilence("gpu-b", 4000)}
    stale = view(1, Phase.FORWARD, age_s=4000, node_rank=1)
    assert not diagnose([view(0, age_s=1), stale], LIMITS, silences).must_stop
    assert not diagnose([view(0, Phase.CHECKPOINT, age_s=70), stale], LIMITS, silences).must_stop
    waiting = view(2, Phase.BACKWARD, 6, age_s=70)
    assert not diagnose([view(0, Phase.CHECKPOINT, age_s=70), waiting, stale], LIMITS, silences).must_stop
    assert diagnose([view(0, Phase.FORWARD, age_s=70), stale], LIMITS, silences).must_stop


def test_a_silent_node_is_the_culprit_once_the_others_make_no_progress() -> None:
    silences = {1: NodeSilence("gpu-b", 61)}
    views = [view(0, Phase.COLLECTIVE, age_s=61), view(1, Phase.FORWARD, age_s=61, node_rank=1)]
    run = diagnose(views, LIMITS, silences)
    assert kinds(run.diagnoses) == ["waiting", "silent"]
    assert run.cause == "no message from node 1 (host gpu-b) for 61 s"
    assert not diagnose([view(0, age_s=5), views[1]], LIMITS, silences).must_stop
    assert not diagnose(views, LIMITS, {1: NodeSilence("gpu-b", 59)}).must_stop


def test_a_silent_node_is_reported_even_if_its_ranks_are_not_known() -> None:
    run = diagnose([view(2, Phase.COLLECTIVE, age_s=61, node_rank=1)], LIMITS, {0: NodeSilence("gpu-a", 61)})
    assert run.must_stop
    assert "node 0 (host gpu-a)" in run.cause


RANKS = st.lists(
    st.tuples(
        st.sampled_from(list(Phase)),
        st.none() | st.integers(0, 3),
        st.floats(0, 2000),
        st.sampled_from(list(ProcessState)),
        st.none() | st.integers(0, 2),
        st.integers(0, 4),
        st.floats(0, 5),
    ),
    min_size=1,
    max_size=6,
)


@given(RANKS)
def test_a_stopped_run_has_a_culprit_and_not_all_ranks_wait(
    ranks: list[tuple[Phase, int | None, float, ProcessState, int | None, int, float]],
) -> None:
    views = [
        view(
            rank,
            phase,
            step,
            age_s,
            state=state,
            microbatch=microbatch,
            collectives=collectives,
            ended_s=ended_s,
            world_size=len(ranks),
        )
        for rank, (phase, step, age_s, state, microbatch, collectives, ended_s) in enumerate(ranks)
    ]
    run = diagnose(views, LIMITS)
    assert len(run.diagnoses) == len(views)
    assert run.must_stop == bool(run.cause)
    culprits = [diagnosis for diagnosis in run.diagnoses if diagnosis.is_culprit]
    if run.must_stop:
        assert culprits
        assert any(diagnosis.kind is not DiagnosisKind.WAITING for diagnosis in run.diagnoses)
    assert all(
        diagnosis.kind is not DiagnosisKind.WAITING and diagnosis.kind is not DiagnosisKind.RUNNING
        for diagnosis in culprits
    )


@given(RANKS)
def test_ranks_within_all_limits_never_stop_a_run(
    ranks: list[tuple[Phase, int | None, float, ProcessState, int | None, int, float]],
) -> None:
    views = [
        view(rank, phase, step, min(age_s, 299), microbatch=microbatch, collectives=collectives)
        for rank, (phase, step, age_s, _, microbatch, collectives, _) in enumerate(ranks)
        if phase is not Phase.FAILED
    ]
    assert not diagnose(views, LIMITS).must_stop


def worker(number: int = 0, age_s: float = 301.0, **other: object) -> ProcessView:
    return view(1, Phase.LOADING, None, age_s, worker=number, **other)  # type: ignore[arg-type]


def test_a_worker_that_is_stuck_at_a_cut_is_reported() -> None:
    stuck = worker(cuts=("talk-7",))
    idle = worker(1, age_s=400)
    diagnoses = diagnoses_of(view(0, Phase.COLLECTIVE, age_s=301), view(1, Phase.LOADING, age_s=301), stuck, idle)
    assert kinds(diagnoses) == ["waiting", "stuck", "stuck", "running"]
    assert diagnoses[1].reason == "in LOADING for 301 s (limit 300 s); worker 0 is stuck, at cut talk-7"
    assert diagnoses[2].reason == "silent for 301 s, at cut talk-7"


def test_a_worker_that_died_recently_or_is_stopped_is_reported() -> None:
    dead = worker(0, state=ProcessState.GONE, ended_s=310, cuts=("a", "b"))
    stopped = worker(1, state=ProcessState.STOPPED)
    long_dead = worker(2, state=ProcessState.GONE, ended_s=4000)
    diagnoses = diagnoses_of(view(1, Phase.LOADING, age_s=301), dead, stopped, long_dead)
    assert kinds(diagnoses) == ["stuck", "dead", "stopped", "dead"]
    assert culprits(diagnoses) == [0, 1, 2]
    assert "worker 0 is dead, at one of 2 cuts (first: a); worker 1 is stopped" in diagnoses[0].reason


def test_workers_are_no_culprits_if_their_rank_is_not_loading() -> None:
    diagnoses = diagnoses_of(view(1, Phase.FORWARD, age_s=301), worker(cuts=("a",)))
    assert culprits(diagnoses) == [0]


def test_the_death_of_a_worker_alone_does_not_stop_the_run() -> None:
    assert continuing(view(1), worker(state=ProcessState.GONE, ended_s=100)) == ["running", "dead"]


def test_the_report_names_the_url_that_a_worker_waits_for() -> None:
    stuck = worker(cuts=("talk-7",), waits_for="s3://speech/audio_3.tar")
    diagnoses = diagnoses_of(view(0, Phase.COLLECTIVE, age_s=301), view(1, Phase.LOADING, age_s=301), stuck)
    waiting = "at cut talk-7, waiting for s3://speech/audio_3.tar"
    assert diagnoses[1].reason == f"in LOADING for 301 s (limit 300 s); worker 0 is stuck, {waiting}"
    assert diagnoses[2].reason == f"silent for 301 s, {waiting}"
