from typing import Any

import pytest

from nestguard import Phase
from nestguard.diagnose.diagnosis import Diagnosis, DiagnosisKind
from nestguard.diagnose.run_diagnosis import diagnose
from nestguard.observe.view import DevicePosition, ProcessState, ProcessView
from tests.nestguard.diagnose.diagnoses import LIMITS, continuing, culprits, diagnoses_of, kinds, unseen
from tests.nestguard.views import view


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
