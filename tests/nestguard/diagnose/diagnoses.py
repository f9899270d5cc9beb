"""Diagnoses runs for tests, and shortens the results for comparison."""

from collections.abc import Sequence

from nestguard import Phase, StallLimits
from nestguard.diagnose.diagnosis import Diagnosis
from nestguard.diagnose.run_diagnosis import diagnose
from nestguard.observe.view import ProcessState, ProcessView
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
