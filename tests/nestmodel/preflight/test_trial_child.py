import os
import signal
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from nestdata import PlanConfig
from nestmodel import TrainingError
from nestmodel.preflight import trial_child
from nestmodel.preflight.trial import Shape
from nestmodel.preflight.trial_child import TrialChild, TrialSettings
from tests.training import tiny_config

RATE = 16000
PLAN = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1)
SHAPES: list[Shape] = [(2, RATE), (1, 3 * RATE)]


def settings(**changed: Any) -> TrialSettings:
    given = TrialSettings(
        model=tiny_config(),
        backend="auto",
        precision="32-true",
        device="cpu",
        num_threads=1,
        limit_bytes=6 * 10**9,
        margin=0.5,
        timeout_s=300.0,
    )
    return replace(given, **changed)


@pytest.mark.slow
def test_one_child_runs_trials_until_one_exceeds_the_limit_and_the_next_one_goes_on() -> None:
    with closing(TrialChild(settings(limit_bytes=3 * 10**9))) as trials:
        first = trials.run(PLAN, SHAPES)
        child = trials._child
        assert child is not None
        assert first.too_large is None
        assert len(first.seconds) == 2
        assert min(first.seconds) > 0
        assert first.allowed_bytes == 1_500_000_000
        assert 10**8 < first.peak_bytes < first.allowed_bytes
        assert trials.run(PLAN, [(3, RATE)]).too_large is None
        assert trials._child is child
        # An hour needs many gigabytes.
        ended = trials.run(PLAN, [*SHAPES, (60, 60 * RATE)])
        assert (ended.too_large, ended.peak_bytes) == ((60, 60 * RATE), 0)
        assert child.exitcode is not None
        assert trials.run(PLAN, SHAPES).too_large is None
        child = trials._child
    assert child is not None
    assert child.exitcode is not None


@pytest.mark.slow
def test_a_trial_that_fails_or_hangs_is_an_error_and_not_a_lack_of_memory() -> None:
    with closing(TrialChild(settings(precision="no such precision"))) as trials:
        with pytest.raises(TrainingError, match="a trial step failed: "):
            trials.run(PLAN, SHAPES)
    with closing(TrialChild(settings(timeout_s=0.1))) as trials:
        with pytest.raises(TrainingError, match=r"no progress for 0\.1 s"):
            trials.run(PLAN, SHAPES)


def killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_child_that_is_killed_on_a_cpu_ran_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_child, "run_trials", killed)
    with closing(TrialChild(settings())) as trials:
        result = trials.run(PLAN, SHAPES)
    assert (result.too_large, result.peak_bytes, result.allowed_bytes) == (SHAPES[0], 0, 3 * 10**9)
    with closing(TrialChild(settings(device="cuda:0"))) as trials:
        with pytest.raises(TrainingError, match="a trial ended with exit code -9"):
            trials.run(PLAN, SHAPES)
