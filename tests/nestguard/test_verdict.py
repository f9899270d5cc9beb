from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nestguard import Phase, StallLimits
from nestguard.process import ProcessState
from nestguard.verdict import Diagnosis, DiagnosisKind, Silence, diagnose
from nestguard.view import ProcessView
from tests.nestguard.views import view

LIMITS = StallLimits(step_s=300, first_step_s=900, validation_s=900, checkpoint_s=900, finishing_s=300)


def verdicts_of(*views: ProcessView) -> tuple[Diagnosis, ...]:
    judgement = diagnose(views, LIMITS)
    assert judgement.stop
    assert judgement.cause
    return judgement.verdicts


def words(verdicts: Sequence[Diagnosis]) -> list[str]:
    return [str(verdict.word) for verdict in verdicts]


def culprits(verdicts: Sequence[Diagnosis]) -> list[int]:
    return [number for number, verdict in enumerate(verdicts) if verdict.is_culprit]


def goes_on(*views: ProcessView) -> list[str]:
    judgement = diagnose(views, LIMITS)
    assert not judgement.stop
    assert judgement.cause == ""
    return words(judgement.verdicts)


def test_ranks_within_their_limits_are_running() -> None:
    assert goes_on(view(0, age_s=299), view(1, Phase.COLLECTIVE, age_s=299)) == ["running", "running"]


def test_who_has_got_least_far_is_stuck_and_those_in_a_collective_wait_for_it() -> None:
    verdicts = verdicts_of(view(0, Phase.COLLECTIVE, age_s=301), view(1, Phase.FORWARD, age_s=302))
    assert words(verdicts) == ["waiting", "stuck"]
    assert verdicts[0].reason == "for rank 1"
    assert verdicts[1].reason == "in FORWARD for 302 s (limit 300 s)"


def test_an_earlier_microbatch_is_less_far_whatever_the_phase() -> None:
    behind = view(1, Phase.BACKWARD, age_s=302, microbatch=1)
    ahead = view(0, Phase.LOADING, age_s=10, microbatch=2)
    assert words(verdicts_of(ahead, behind)) == ["running", "stuck"]


def test_an_earlier_step_is_less_far_whatever_the_microbatch() -> None:
    behind = view(1, Phase.BACKWARD, 4, age_s=302, microbatch=7)
    ahead = view(0, Phase.BACKWARD, 5, age_s=302, microbatch=0)
    assert words(verdicts_of(ahead, behind)) == ["waiting", "stuck"]


def test_the_collective_of_a_step_comes_after_all_its_microbatches() -> None:
    behind = view(1, Phase.BACKWARD, age_s=302, microbatch=7)
    ahead = view(0, Phase.COLLECTIVE, age_s=302, microbatch=0)
    assert words(verdicts_of(ahead, behind)) == ["waiting", "stuck"]


def test_several_that_are_least_far_are_all_stuck() -> None:
    verdicts = verdicts_of(
        view(0, Phase.COLLECTIVE, age_s=301), view(1, age_s=301), view(2, age_s=290), view(3, age_s=2)
    )
    assert words(verdicts) == ["waiting", "stuck", "stuck", "running"]
    assert verdicts[0].reason == "for ranks 1-2"


def test_all_in_the_same_collective_are_all_stuck() -> None:
    verdicts = verdicts_of(view(0, Phase.COLLECTIVE, age_s=301), view(1, Phase.COLLECTIVE, age_s=299))
    assert words(verdicts) == ["stuck", "stuck"]
    assert verdicts[0].reason.startswith("all ranks are in the same collective: the network")


def test_ranks_that_are_not_known_are_not_vouched_for() -> None:
    verdicts = verdicts_of(*(view(rank, Phase.COLLECTIVE, age_s=301, world_size=4) for rank in (0, 1)))
    assert verdicts[0].reason.startswith("all ranks that are known are in the same collective")


def test_a_rank_at_the_same_place_with_fewer_collectives_has_skipped_one() -> None:
    verdicts = verdicts_of(
        view(0, Phase.COLLECTIVE, age_s=301, collectives=6), view(1, Phase.COLLECTIVE, age_s=301, collectives=5)
    )
    assert words(verdicts) == ["waiting", "stuck"]
    assert verdicts[1].reason.startswith("has skipped a collective: it has entered 5")


def test_a_rank_a_step_ahead_with_as_many_collectives_has_skipped_one() -> None:
    verdicts = verdicts_of(
        view(0, Phase.COLLECTIVE, 5, age_s=301, collectives=6), view(1, Phase.COLLECTIVE, 6, age_s=301, collectives=6)
    )
    assert words(verdicts) == ["waiting", "stuck"]


def test_steps_are_counted_from_the_one_that_a_run_resumed_at() -> None:
    one = view(0, Phase.COLLECTIVE, 1005, age_s=301, collectives=6, first_step=1000)
    other = view(1, Phase.COLLECTIVE, 1006, age_s=301, collectives=6, first_step=1000)
    assert words(verdicts_of(one, other)) == ["waiting", "stuck"]


def test_where_collectives_are_not_counted_nobody_has_skipped_one() -> None:
    verdicts = verdicts_of(view(0, step=6, age_s=301, collectives=0), view(1, step=5, age_s=301, collectives=0))
    assert culprits(verdicts) == [1]


def test_one_that_is_behind_and_has_entered_fewer_has_skipped_nothing() -> None:
    verdicts = verdicts_of(
        view(0, Phase.COLLECTIVE, age_s=301, collectives=6), view(1, Phase.BACKWARD, age_s=301, collectives=5)
    )
    assert verdicts[1].reason.startswith("in BACKWARD")


def test_more_collectives_than_steps_do_not_accuse_whoever_has_not_come_to_them() -> None:
    behind = view(0, Phase.FORWARD, 5, age_s=301, collectives=5)
    after_validation = view(1, Phase.COLLECTIVE, 6, age_s=301, collectives=8)
    assert words(verdicts_of(behind, after_validation)) == ["stuck", "waiting"]


def test_a_stopped_rank_is_to_blame_wherever_it_is() -> None:
    stopped = view(0, Phase.COLLECTIVE, age_s=301, state=ProcessState.STOPPED)
    verdicts = verdicts_of(stopped, view(1, Phase.COLLECTIVE, age_s=301))
    assert words(verdicts) == ["stopped", "waiting"]


def test_a_rank_may_be_stopped_for_a_while() -> None:
    assert goes_on(view(0, state=ProcessState.STOPPED, age_s=200), view(1)) == ["stopped", "running"]


def test_waiting_for_a_checkpoint_takes_as_long_as_a_checkpoint_may() -> None:
    saving = view(0, Phase.CHECKPOINT, 4, age_s=310)
    assert goes_on(saving, view(1, Phase.COLLECTIVE, 5, age_s=305)) == ["running", "running"]
    late = view(0, Phase.CHECKPOINT, 4, age_s=901)
    assert words(verdicts_of(late, view(1, Phase.COLLECTIVE, 5, age_s=896))) == ["stuck", "waiting"]


def test_a_rank_that_beats_but_is_behind_is_to_blame_if_nothing_else_explains_it() -> None:
    verdicts = verdicts_of(view(0, Phase.COLLECTIVE, age_s=1201), view(1, Phase.LOADING, age_s=3))
    assert words(verdicts) == ["waiting", "stuck"]
    assert verdicts[1].reason == "alive in LOADING, but behind: others have waited for 1201 s"


def test_a_rank_that_has_just_written_a_slow_checkpoint_is_given_its_time() -> None:
    others = view(1, Phase.COLLECTIVE, 5, age_s=850), view(2, Phase.BACKWARD, 5, age_s=850)
    assert goes_on(view(0, Phase.CHECKPOINT, 4, age_s=850), *others) == ["running"] * 3
    assert goes_on(view(0, Phase.LOADING, 5, age_s=0), *others) == ["running"] * 3
    assert goes_on(view(0, Phase.FORWARD, 5, age_s=299), *others) == ["running"] * 3
    assert words(verdicts_of(view(0, Phase.FORWARD, 5, age_s=301), *others)) == ["stuck", "waiting", "waiting"]


def test_a_rank_that_beats_and_is_behind_is_running_if_another_is_late_in_loading() -> None:
    verdicts = verdicts_of(view(0, Phase.LOADING, 6, age_s=301), view(1, Phase.FORWARD, 5, age_s=3))
    assert words(verdicts) == ["stuck", "running"]


def test_the_first_step_has_a_limit_of_its_own() -> None:
    slow = view(0, step=0, age_s=800)
    assert goes_on(slow, view(1, Phase.COLLECTIVE, 0, age_s=800)) == ["running", "running"]
    assert words(verdicts_of(view(0, step=0, age_s=901), view(1, Phase.COLLECTIVE, 0, age_s=900))) == [
        "stuck",
        "waiting",
    ]


def test_a_rank_that_is_never_seen_is_to_blame_for_those_that_wait_at_the_start() -> None:
    missing = view(1, Phase.STARTING, None, age_s=905, state=ProcessState.NOT_STARTED, first_step=None)
    started = view(0, Phase.STARTING, None, age_s=901, first_step=None)
    verdicts = verdicts_of(started, missing)
    assert words(verdicts) == ["waiting", "not started"]
    assert culprits(verdicts) == [1]


def test_a_rank_that_is_gone_without_a_word_is_dead_after_a_moment() -> None:
    gone = view(1, state=ProcessState.GONE, ended_s=0.1)
    assert goes_on(view(0, Phase.COLLECTIVE), gone) == ["waiting", "dead"]
    verdicts = verdicts_of(view(0, Phase.COLLECTIVE), view(1, state=ProcessState.ZOMBIE, ended_s=0.6))
    assert words(verdicts) == ["waiting", "dead"]
    assert culprits(verdicts) == [1]


def test_a_rank_that_failed_has_two_seconds_to_leave() -> None:
    assert goes_on(view(0), view(1, Phase.FAILED, age_s=1.9)) == ["running", "failed"]
    verdicts = verdicts_of(view(0), view(1, Phase.FAILED, age_s=2.1, detail="ValueError: no"))
    assert verdicts[1] == Diagnosis(DiagnosisKind.FAILED, "ValueError: no", True)


def test_what_others_make_of_a_death_comes_after_it() -> None:
    verdicts = verdicts_of(
        view(0, Phase.FAILED, age_s=0.65, detail="connection reset"), view(1, state=ProcessState.GONE, ended_s=0.6)
    )
    assert words(verdicts) == ["failed", "dead"]
    assert culprits(verdicts) == [1]
    assert verdicts[0].reason == "after rank 1: connection reset"


def test_those_that_are_ended_after_a_failure_come_after_it() -> None:
    verdicts = verdicts_of(
        view(0, Phase.FAILED, age_s=1.2, state=ProcessState.GONE, ended_s=0.8, detail="ValueError: no"),
        view(1, state=ProcessState.GONE, ended_s=0.6),
    )
    assert culprits(verdicts) == [0]
    assert verdicts[1].reason == "after rank 0"


def test_a_rank_that_has_skipped_a_collective_is_to_blame_for_those_that_break_at_it() -> None:
    broken = view(0, Phase.COLLECTIVE, 5, state=ProcessState.GONE, ended_s=0.6)
    skipper = view(1, Phase.BACKWARD, 6, collectives=5)
    verdicts = verdicts_of(broken, skipper)
    assert words(verdicts) == ["dead", "stuck"]
    assert culprits(verdicts) == [1]
    assert verdicts[0].reason == "after rank 1"
    failed = view(1, Phase.FAILED, 6, age_s=0.5, last_phase=Phase.BACKWARD, collectives=5, detail="connection reset")
    verdicts = verdicts_of(broken, failed)
    assert words(verdicts) == ["dead", "failed"]
    assert culprits(verdicts) == [1]
    assert verdicts[1].reason.startswith("has skipped a collective: it has entered 5")
    assert verdicts[1].reason.endswith("; then connection reset")
    alone = verdicts_of(view(0, Phase.COLLECTIVE, 5), replace(failed, age_s=2.1))
    assert culprits(alone) == [1]
    assert alone[1].reason.endswith("; then connection reset")


def test_a_rank_that_fails_before_a_collective_has_not_skipped_it() -> None:
    failed = view(1, Phase.FAILED, 5, age_s=2.1, last_phase=Phase.FORWARD, collectives=5, detail="ValueError: no")
    assert verdicts_of(view(0, Phase.COLLECTIVE, 5), failed)[1] == Diagnosis(
        DiagnosisKind.FAILED, "ValueError: no", True
    )


def unseen(rank: int, ended_s: float = 0.0) -> ProcessView:
    return view(rank, Phase.STARTING, None, 0.0, state=ProcessState.UNSEEN, ended_s=ended_s)


def test_a_rank_that_is_out_of_sight_is_to_blame_where_all_others_wait_for_somebody() -> None:
    verdicts = verdicts_of(view(0, Phase.BACKWARD, age_s=301), unseen(1))
    assert words(verdicts) == ["waiting", "unseen"]
    assert verdicts[0].reason == "for rank 1"
    assert verdicts[1] == Diagnosis(DiagnosisKind.UNSEEN, "nothing was ever heard of it", True)
    assert culprits(verdicts_of(view(0, Phase.FORWARD, age_s=301), unseen(1))) == [0]


def test_a_rank_that_is_out_of_sight_stops_no_run() -> None:
    assert goes_on(view(0), unseen(1), unseen(2, ended_s=5000)) == ["running", "unseen", "unseen"]


def test_a_rank_that_the_monitor_never_saw_stops_no_run_that_gets_on() -> None:
    # Its heartbeat may lie elsewhere, or could not be written; a step is not finished without it.
    missing = view(1, Phase.STARTING, None, age_s=5000, state=ProcessState.NOT_STARTED, first_step=None)
    assert goes_on(view(0, step=900), missing) == ["running", "unseen"]
    verdicts = verdicts_of(view(0, Phase.COLLECTIVE, 900, age_s=301), missing)
    assert words(verdicts) == ["waiting", "unseen"]


def test_a_silent_node_alone_stops_no_run_that_gets_on() -> None:
    silences = {1: Silence("gpu-b", 4000)}
    stale = view(1, Phase.FORWARD, age_s=4000, node_rank=1)
    assert not diagnose([view(0, age_s=1), stale], LIMITS, silences).stop
    assert not diagnose([view(0, Phase.CHECKPOINT, age_s=70), stale], LIMITS, silences).stop
    waiting = view(2, Phase.BACKWARD, 6, age_s=70)
    assert not diagnose([view(0, Phase.CHECKPOINT, age_s=70), waiting, stale], LIMITS, silences).stop
    assert diagnose([view(0, Phase.FORWARD, age_s=70), stale], LIMITS, silences).stop


def test_a_node_that_is_lost_just_before_a_rank_fails_is_named_with_it() -> None:
    failed = view(0, Phase.FAILED, 5, age_s=2.1, last_phase=Phase.COLLECTIVE, detail="connection closed")
    judgement = diagnose([failed, unseen(1, ended_s=3)], LIMITS)
    assert culprits(judgement.verdicts) == [0, 1]
    assert judgement.cause == "rank 1 is out of sight; rank 0 has failed, step 5"
    assert judgement.verdicts[1].reason == "the monitors of the nodes have been out of touch for 3 s"
    assert culprits(diagnose([failed, unseen(1, ended_s=500)], LIMITS).verdicts) == [0]


def test_where_all_are_gone_nobody_is_waited_for() -> None:
    gone = [view(rank, state=ProcessState.GONE, ended_s=0.1 * rank) for rank in (0, 1)]
    assert culprits(verdicts_of(*gone)) == [1]


def test_those_that_are_done_or_leave_may_go() -> None:
    done = view(0, Phase.DONE, age_s=5000, state=ProcessState.GONE, ended_s=5000)
    leaving = view(1, Phase.LEAVING, age_s=5000, state=ProcessState.ZOMBIE, ended_s=5000)
    assert goes_on(done, leaving, view(2)) == ["done", "leaving", "running"]


def test_those_that_take_part_no_more_are_named_to_those_that_wait() -> None:
    verdicts = verdicts_of(view(0, Phase.COLLECTIVE, age_s=301), view(1, Phase.DONE, 9), view(2, Phase.LEAVING, 9))
    assert culprits(verdicts) == [0]
    assert verdicts[0].reason.endswith("; done already: rank 1; asked to leave: rank 2")


def worker(number: int = 0, age_s: float = 301.0, **other: object) -> ProcessView:
    return view(1, Phase.LOADING, None, age_s, worker=number, **other)  # type: ignore[arg-type]


def test_a_worker_that_is_stuck_on_a_cut_is_named() -> None:
    stuck = worker(cuts=("talk-7",))
    idle = worker(1, age_s=400)
    verdicts = verdicts_of(view(0, Phase.COLLECTIVE, age_s=301), view(1, Phase.LOADING, age_s=301), stuck, idle)
    assert words(verdicts) == ["waiting", "stuck", "stuck", "running"]
    assert verdicts[1].reason == "in LOADING for 301 s (limit 300 s); worker 0 is stuck, at cut talk-7"
    assert verdicts[2].reason == "silent for 301 s, at cut talk-7"


def test_a_worker_that_died_lately_or_is_stopped_is_named() -> None:
    dead = worker(0, state=ProcessState.GONE, ended_s=310, cuts=("a", "b"))
    stopped = worker(1, state=ProcessState.STOPPED)
    long_dead = worker(2, state=ProcessState.GONE, ended_s=4000)
    verdicts = verdicts_of(view(1, Phase.LOADING, age_s=301), dead, stopped, long_dead)
    assert words(verdicts) == ["stuck", "dead", "stopped", "dead"]
    assert culprits(verdicts) == [0, 1, 2]
    assert "worker 0 is dead, among 2 cuts from a on; worker 1 is stopped" in verdicts[0].reason


def test_workers_are_not_to_blame_for_a_rank_that_is_not_loading() -> None:
    verdicts = verdicts_of(view(1, Phase.FORWARD, age_s=301), worker(cuts=("a",)))
    assert culprits(verdicts) == [0]


def test_the_end_of_a_worker_stops_no_run() -> None:
    assert goes_on(view(1), worker(state=ProcessState.GONE, ended_s=100)) == ["running", "dead"]


def test_a_silent_node_is_to_blame_once_the_others_get_no_further() -> None:
    silences = {1: Silence("gpu-b", 61)}
    views = [view(0, Phase.COLLECTIVE, age_s=61), view(1, Phase.FORWARD, age_s=61, node_rank=1)]
    judgement = diagnose(views, LIMITS, silences)
    assert words(judgement.verdicts) == ["waiting", "silent"]
    assert judgement.cause == "node 1 (host gpu-b) has not been heard from for 61 s"
    assert not diagnose([view(0, age_s=5), views[1]], LIMITS, silences).stop
    assert not diagnose(views, LIMITS, {1: Silence("gpu-b", 59)}).stop


def test_a_node_that_knows_nothing_of_the_silent_one_reports_all_the_same() -> None:
    judgement = diagnose([view(2, Phase.COLLECTIVE, age_s=61, node_rank=1)], LIMITS, {0: Silence("gpu-a", 61)})
    assert judgement.stop
    assert "node 0 (host gpu-a)" in judgement.cause


RANKS = st.lists(
    st.builds(
        lambda phase, step, age_s, state, microbatch, collectives, ended_s: (
            phase,
            step,
            age_s,
            state,
            microbatch,
            collectives,
            ended_s,
        ),
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
def test_whenever_a_run_is_stopped_somebody_is_to_blame_and_not_all_are_waiting(
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
    judgement = diagnose(views, LIMITS)
    assert len(judgement.verdicts) == len(views)
    assert judgement.stop == bool(judgement.cause)
    blamed = [verdict for verdict in judgement.verdicts if verdict.is_culprit]
    if judgement.stop:
        assert blamed
        assert any(verdict.word is not DiagnosisKind.WAITING for verdict in judgement.verdicts)
    assert all(
        verdict.word is not DiagnosisKind.WAITING and verdict.word is not DiagnosisKind.RUNNING for verdict in blamed
    )


@given(RANKS)
def test_nobody_is_stopped_for_silence_within_all_limits(
    ranks: list[tuple[Phase, int | None, float, ProcessState, int | None, int, float]],
) -> None:
    views = [
        view(rank, phase, step, min(age_s, 299), microbatch=microbatch, collectives=collectives)
        for rank, (phase, step, age_s, _, microbatch, collectives, _) in enumerate(ranks)
        if phase is not Phase.FAILED
    ]
    assert not diagnose(views, LIMITS).stop
