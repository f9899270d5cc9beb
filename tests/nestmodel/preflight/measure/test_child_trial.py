import shutil
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from nestmodel import TrainingError
from nestmodel.preflight.measure.child_trial import TrialSettings, run_trial
from nestmodel.preflight.measure.trial_step import Shape
from tests.training import tiny_config

RATE = 16000


def settings(limit_bytes: int, *, margin: float = 0.0, timeout_s: float = 300.0) -> TrialSettings:
    return TrialSettings(
        model=tiny_config(),
        kernels="auto",
        num_shapes=None,
        precision="32-true",
        device="cpu",
        num_threads=1,
        limit_bytes=limit_bytes,
        margin=margin,
        timeout_s=timeout_s,
    )


@pytest.mark.slow
def test_a_trial_measures_steps_and_their_peak_and_is_ended_at_the_limit() -> None:
    shapes: list[Shape] = [(2, RATE), (1, 3 * RATE)]
    fitting = run_trial(settings(6 * 10**9, margin=0.5), shapes)
    assert fitting.too_large is None
    assert len(fitting.times) == 2  # one for each shape
    assert all(time.microbatch_s > 0 and time.optimizer_s > 0 for time in fitting.times)
    assert fitting.allowed_bytes == 3 * 10**9
    assert 10**8 < fitting.peak_bytes < 3 * 10**9
    # A batch of an hour needs gigabytes; the child is ended when it has 200 MB more than the small steps took.
    shapes.append((60, 60 * RATE))
    ended = run_trial(settings(fitting.peak_bytes + 200 * 10**6), shapes)
    assert ended.too_large == (60, 60 * RATE)


@pytest.mark.slow
def test_a_trial_that_fails_or_hangs_is_an_error_and_not_a_lack_of_memory() -> None:
    with pytest.raises(TrainingError, match="a trial step failed: "):
        run_trial(replace(settings(6 * 10**9), precision="no such precision"), [(1, RATE)])
    with pytest.raises(TrainingError, match=r"no progress for 0\.1 s"):
        run_trial(settings(6 * 10**9, timeout_s=0.1), [(1, RATE)])


def test_a_child_that_ends_before_it_is_given_its_task_is_an_error_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class EndedChild(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", EndedChild)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(TrainingError, match="a trial ended with exit code 1"):
        run_trial(settings(6 * 10**9), [(1, RATE)])


def test_a_child_that_is_killed_on_a_cpu_ran_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledChild(subprocess.Popen[str]):
        def __init__(self, _: list[str], **options: Any) -> None:
            super().__init__(["sleep", "60"], **options)
            self.kill()
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", KilledChild)
    result = run_trial(settings(6 * 10**9, margin=0.5), [(2, RATE), (1, 3 * RATE)])
    assert (result.too_large, result.peak_bytes, result.allowed_bytes) == ((2, RATE), 0, 3 * 10**9)
    with pytest.raises(TrainingError, match="a trial ended with exit code -9"):
        run_trial(replace(settings(6 * 10**9), device="cuda:0"), [(2, RATE)])
