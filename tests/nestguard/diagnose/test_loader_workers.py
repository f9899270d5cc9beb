from nestguard import Phase
from nestguard.observe.process import ProcessState
from nestguard.observe.view import ProcessView
from tests.nestguard.diagnose.diagnoses import continuing, culprits, diagnoses_of, kinds
from tests.nestguard.views import view


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
