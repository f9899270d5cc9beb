from hypothesis import given
from hypothesis import strategies as st

from nestguard import Phase
from nestguard.diagnose.diagnosis import DiagnosisKind
from nestguard.diagnose.run_diagnosis import diagnose
from nestguard.observe.view import NodeSilence, ProcessState, ProcessView
from tests.nestguard.diagnose.diagnoses import LIMITS, continuing, culprits, diagnoses_of, kinds
from tests.nestguard.views import view


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
