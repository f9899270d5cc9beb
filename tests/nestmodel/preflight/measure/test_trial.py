from typing import Any

import pytest
import torch

from nestdata import AudioNoiseBatch
from nestmodel.preflight.measure.trial import TrialResult, run_shapes
from nestmodel.preflight.measure.trial_step import Shape, StepTime

SHAPES: list[Shape] = [(2, 800), (1, 1600)]


class FakeStep:
    """Takes as many seconds as steps were made, and fails at a shape."""

    num_trained = 3

    def __init__(self, too_large: Shape | None = None) -> None:
        self.too_large = too_large
        self.shapes: list[Shape] = []

    def __call__(self, batch: AudioNoiseBatch) -> StepTime:
        self.shapes.append((batch.audio.shape[0], batch.audio.shape[1]))
        if self.shapes[-1] == self.too_large:
            raise torch.OutOfMemoryError("CUDA out of memory.\nIn two lines.")
        return StepTime(microbatch_s=float(len(self.shapes)), optimizer_s=0.0)


def run(step: Any, **options: Any) -> TrialResult:
    given: dict[str, Any] = {"allowed_bytes": 0, "with_ddp": True, **options}
    return run_shapes(lambda: step, SHAPES, device=torch.device("cpu"), **given)


def test_each_shape_runs_twice_so_that_moments_and_graphs_are_in_memory_and_the_second_step_is_timed() -> None:
    step = FakeStep()
    steps: list[int] = []
    result = run(step, on_step=lambda: steps.append(len(step.shapes)))
    assert step.shapes == [SHAPES[0], SHAPES[0], SHAPES[1], SHAPES[1]]
    assert steps == [1, 2, 3, 4]
    assert result.too_large is None
    assert result.peak_bytes > 0
    assert [time.total_s for time in result.times] == [2.0, 4.0]


def test_a_failed_allocation_names_its_shape_and_any_other_error_is_raised() -> None:
    result = run(FakeStep(too_large=SHAPES[1]))
    assert (result.too_large, result.peak_bytes, len(result.times)) == (SHAPES[1], 0, 1)
    assert result.error == "CUDA out of memory.\nIn two lines."
    with pytest.raises(AttributeError, match="num_trained"):
        run(object())


def test_the_first_shape_above_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = FakeStep()
    monkeypatch.setattr("nestmodel.preflight.measure.trial.PeakMemory.peak_bytes", lambda _: 100 * len(step.shapes))
    assert run(step, allowed_bytes=200).too_large == SHAPES[1]
    assert run(FakeStep(), allowed_bytes=2000).too_large is None
