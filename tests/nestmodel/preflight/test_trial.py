from collections import namedtuple
from typing import Any

import pytest
import torch

from nestdata import AudioNoiseBatch, BatchPlan, PlanConfig
from nestmodel import ConfigError
from nestmodel.preflight.preflight_config import parse_bytes
from nestmodel.preflight.trial import Shape, TrialResult, largest_shapes, run_shapes

RATE = 16000
SHAPES: list[Shape] = [(2, 800), (1, 1600)]
Usage = namedtuple("Usage", "ru_maxrss")


def test_the_largest_shapes_have_most_samples_the_longest_and_the_most_cuts() -> None:
    lengths = [RATE] * 60 + [4 * RATE] * 14 + [5 * RATE] * 2
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
    assert largest_shapes(plan) == [(2, 5 * RATE), (10, RATE)]
    longer = [RATE] * 64 + [99_000] * 8
    plan = BatchPlan(longer, RATE, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
    assert largest_shapes(plan) == [(10, RATE), (1, 99_000)]


class FakeStep:
    """Takes as many seconds as steps were made, and fails at a shape."""

    num_trained = 3

    def __init__(self, too_large: Shape | None = None) -> None:
        self.too_large = too_large
        self.shapes: list[Shape] = []

    def __call__(self, batch: AudioNoiseBatch) -> float:
        self.shapes.append((batch.audio.shape[0], batch.audio.shape[1]))
        if self.shapes[-1] == self.too_large:
            raise torch.OutOfMemoryError("CUDA out of memory.\nIn two lines.")
        return float(len(self.shapes))


def run(step: Any, **options: Any) -> TrialResult:
    given: dict[str, Any] = {"allowed_bytes": 0, "with_ddp": True, **options}
    return run_shapes(lambda: step, SHAPES, device=torch.device("cpu"), **given)


def test_each_shape_runs_twice_so_that_moments_are_in_memory_and_the_second_step_is_timed() -> None:
    step = FakeStep()
    steps: list[int] = []
    result = run(step, on_step=lambda: steps.append(len(step.shapes)))
    assert step.shapes == [SHAPES[0], SHAPES[0], SHAPES[1], SHAPES[1]]
    assert steps == [1, 2, 3, 4]
    assert result.too_large is None
    assert result.peak_bytes > 0
    assert result.seconds == (2.0, 4.0)


def test_a_failed_allocation_names_its_shape_and_any_other_error_is_raised() -> None:
    result = run(FakeStep(too_large=SHAPES[1]))
    assert (result.too_large, result.peak_bytes, len(result.seconds)) == (SHAPES[1], 0, 1)
    assert result.error == "CUDA out of memory.\nIn two lines."
    with pytest.raises(AttributeError, match="num_trained"):
        run(object())


def test_the_first_shape_above_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = FakeStep()
    monkeypatch.setattr("nestmodel.preflight.trial.PeakMemory.peak_bytes", lambda _: 100 * len(step.shapes))
    assert run(step, allowed_bytes=200).too_large == SHAPES[1]
    assert run(FakeStep(), allowed_bytes=2000).too_large is None


@pytest.mark.parametrize(("text", "number"), [("8GiB", 8 * 2**30), ("750 MB", 750_000_000), ("1.5TB", 1.5e12)])
def test_sizes_are_read_with_their_unit(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["8", "8G", "-1GB"])
def test_a_size_without_unit_or_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"memory_limit is '{text}': give a size with one of the units KB, MB"):
        parse_bytes(text)
